"""Which records of containerd `ember rm` removes, and which keep the content here."""

from __future__ import annotations

import pytest

from snapshotter.errors import NotFoundError
from snapshotter.rpc.image_records import Record, choose, delete, every_record

ONE, TWO = "sha256:1", "sha256:2"
NAME, OTHER = "registry.example/app:1", "registry.example/app:2"
BY_CRI = [
    Record("k8s.io", NAME, ONE, by_cri=True),
    Record("k8s.io", f"registry.example/app@{ONE}", ONE, by_cri=True),
    Record("k8s.io", "sha256:c", ONE, by_cri=True),
]


class Store:
    """containerd's image records in memory."""

    def __init__(self, *records: Record) -> None:
        self.records = list(records)

    async def namespaces(self) -> list[str]:
        return sorted({record.namespace for record in self.records})

    async def image_records(self, namespace: str) -> list[Record]:
        return [record for record in self.records if record.namespace == namespace]

    async def delete_image(self, namespace: str, name: str) -> None:
        for record in self.records:
            if (record.namespace, record.name) == (namespace, name):
                self.records.remove(record)
                return
        raise NotFoundError(name)


def test_a_name_goes_and_a_second_name_of_the_same_content_stays() -> None:
    records = [Record("default", NAME, ONE), Record("default", OTHER, ONE)]
    choice = choose(records, [NAME], "default", NAME)
    assert choice.gone == (records[0],)
    assert choice.left == (records[1],)


def test_another_image_is_nobody_s_concern() -> None:
    records = [Record("default", NAME, ONE), Record("default", OTHER, TWO)]
    choice = choose(records, [NAME], "default", NAME)
    assert (choice.gone, choice.left) == ((records[0],), ())


def test_what_cri_made_beside_a_name_goes_with_it() -> None:
    choice = choose(BY_CRI, [NAME], "k8s.io", NAME)
    assert set(choice.gone) == set(BY_CRI)
    assert choice.left == ()


def test_what_cri_made_stays_while_another_name_needs_it() -> None:
    other = Record("k8s.io", OTHER, ONE, by_cri=True)
    choice = choose([*BY_CRI, other], [NAME], "k8s.io", NAME)
    assert choice.gone == (BY_CRI[0],)
    assert set(choice.left) == {*BY_CRI[1:], other}


def test_a_pin_that_a_user_pulled_is_a_name_like_any_other() -> None:
    pin = Record("default", f"registry.example/app@{ONE}", ONE)
    choice = choose([Record("default", NAME, ONE), pin], [NAME], "default", NAME)
    assert choice.left == (pin,)


def test_the_same_content_in_another_namespace_stays_and_is_named() -> None:
    choice = choose([Record("default", NAME, ONE), *BY_CRI], [NAME], "default", NAME)
    assert choice.gone == (Record("default", NAME, ONE),)
    assert next(str(record) for record in choice.left) == f"{NAME} in namespace k8s.io"


def test_a_namespace_without_it_is_refused_with_the_ones_that_have_it() -> None:
    with pytest.raises(NotFoundError) as caught:
        choose(BY_CRI, [NAME], "wrong", "app:1")
    assert str(caught.value) == (
        "image app:1 is not in containerd's namespace wrong but in k8s.io;"
        " say which with --namespace"
    )


def test_an_image_that_containerd_has_forgotten_is_no_error() -> None:
    choice = choose([Record("default", OTHER, TWO)], [NAME], "default", NAME)
    assert (choice.gone, choice.left) == ((), ())


async def test_the_name_goes_before_what_cri_made_of_it() -> None:
    store = Store(*reversed(BY_CRI))
    assert len(await every_record(store)) == 3
    await delete(store, [*BY_CRI, Record("default", "gone", ONE)])
    assert store.records == []

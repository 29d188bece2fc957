"""What the CRI's pulls and removals teach about credentials.

The kubelet gives a pod's pull secret to the CRI alone, so this is where a snapshotter can learn
it. Reads messages, never changes one, and never fails a call: what can't be read teaches nothing.
"""

from __future__ import annotations

import base64
import binascii
import logging
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from snapshotter.errors import InvalidArgumentError
from snapshotter.oci.credentials import Credential
from snapshotter.oci.pull_credentials import PullCredentials
from snapshotter.rpc.pb.cri import images_pb2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull under way. ``taught`` is what was remembered for it and was not known before."""

    image: str
    taught: Credential | None


class PullSchool:
    """Puts credentials of pulls into ``pulls``, and takes them out when their image goes."""

    def __init__(self, pulls: PullCredentials) -> None:
        self._pulls = pulls

    def pull_begins(self, message: bytes) -> Pull | None:
        """A PullImageRequest went by; its credential is good from now on."""
        try:
            request = images_pb2.PullImageRequest.FromString(message)
        except DecodeError:
            _log.warning("a PullImageRequest can't be read; its credentials are not used")
            return None
        image = request.image.image
        credential = credential_of(request.auth)
        if credential.is_empty:
            return Pull(image, None)
        known = self._pulls.has(image, credential)
        try:
            kept = self._pulls.put(image, credential, request.auth.server_address)
        except InvalidArgumentError as error:
            _log.warning("the credentials of a pull are not used: %s", error)
            return Pull(image, None)
        except Exception:  # whatever it is, the kubelet's pull goes on
            _log.exception("the credentials of a pull are not used")
            return Pull(image, None)
        return Pull(image, credential if kept and not known else None)

    def pull_ends(self, pull: Pull, message: bytes | None) -> None:
        """Its PullImageResponse went by, or (None) it failed: then what it taught is forgotten,
        and what earlier pulls of the image taught is kept."""
        if message is None:
            if pull.taught is not None:
                self._pulls.forget(pull.image, pull.taught)
            return
        try:
            image_id = images_pb2.PullImageResponse.FromString(message).image_ref
        except DecodeError:
            return
        self._pulls.is_image(image_id, pull.image)

    def removed(self, message: bytes) -> None:
        """A RemoveImageRequest was obeyed: the image's credentials are forgotten.

        It names the image by reference or by id, and takes all its references with it.
        """
        try:
            image = images_pb2.RemoveImageRequest.FromString(message).image.image
        except DecodeError:
            return
        self._pulls.forget_image(image)


def credential_of(auth: images_pb2.AuthConfig) -> Credential:
    """The CRI's AuthConfig; ``auth`` (base64 of user:password) counts if there is no username."""
    username, password = auth.username, auth.password
    if not username and auth.auth:
        try:
            username, _, password = (
                base64.b64decode(auth.auth, validate=True).decode().partition(":")
            )
        except (binascii.Error, ValueError):
            username = password = ""
    return Credential(username, password.rstrip("\0"), auth.identity_token, auth.registry_token)

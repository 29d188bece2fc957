"""What the daemon itself takes: memory, wake-ups, its start, and its return after a crash.

Memory after 50 images of 10 layers were pulled; wake-ups while they stand there and nothing
happens; starts as a service manager sees them, from the process to READY=1.
"""

from __future__ import annotations

import socket
import statistics
import time
from functools import partial
from pathlib import Path

from bench.bed.bed import Bed
from bench.bed.crowd import crowd, forget_bytes, noise, pull, stood_on
from bench.bed.ember import Ember
from bench.bed.footprint import own_bytes, switches, wakes
from bench.bed.link import Shape
from bench.bed.process import BedError
from bench.measure import Case, Figure, Result, Settings
from bench.progress import Progress

IMAGES, LAYERS = 50, 10
IDLE_S = 20.0
SETTLED_S = 5.0
READY_S = 60.0
MB = 1e6


def start_seconds(ember: Ember) -> float:
    """Start the daemon; seconds until it says READY=1."""
    path = str(ember.directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(path)
        listener.settimeout(READY_S)
        ember.environment["NOTIFY_SOCKET"] = path
        begin = time.perf_counter()
        try:
            ember.launch()
            while b"READY=1" not in listener.recv(4096):
                pass
            return time.perf_counter() - begin
        except TimeoutError:
            raise BedError(f"ember was not ready after {READY_S:g} s") from None
        finally:
            del ember.environment["NOTIFY_SOCKET"]
            Path(path).unlink()


def answered_seconds(ember: Ember, layer: Path) -> float:
    """Start the daemon; seconds until a read of what is not here goes on, with the right bytes."""
    begin = time.perf_counter()
    ember.launch()
    name = next(layer.glob("layer/f*"))
    with name.open("rb", buffering=0) as file:
        got = file.read(4096)
    seconds = time.perf_counter() - begin
    layer_number = int(name.name[1:])
    if all(noise(n, layer_number, 4096) != got for n in range(IMAGES)):
        raise BedError(f"{name}: what was read after the crash is wrong")
    return seconds


def lazy_layers(ember: Ember) -> list[Path]:
    """Where the lazy layers are mounted."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [Path(line.split()[1]) for line in lines]
    return [point for point in points if point.parent == ember.state / "layers"]


def idle(ember: Ember, seconds: float) -> dict[str, float]:
    """Wake-ups a second of each thread of the daemon that wakes at all, while nothing happens."""
    before = switches(ember.pid)
    time.sleep(seconds)
    found = wakes(before, switches(ember.pid))
    return {f"{name} {number}": count / seconds for (number, name), count in found.items()}


def run(settings: Settings, say: Progress) -> Result:
    result = Result()
    images, idle_s = (6, 5.0) if settings.quick else (IMAGES, IDLE_S)
    members = crowd(images, LAYERS)
    with Bed(Shape(0)) as bed:
        for member in members:
            member.push(bed.registry)
        ember = bed.ember(settings.containerd)
        containerd = bed.containerd(
            settings.containerd, ember_socket=ember.socket, ember_root=ember.root
        )
        ember.start()
        empty = own_bytes(ember.pid)
        with say.step(f"pulling {images} images of {LAYERS} layers"):
            lazy = pull(ember, members)
        after_pulls = own_bytes(ember.pid)
        ember.stop()
        starts = []
        for number in range(settings.rounds):
            with say.step(f"start {number + 1} of {settings.rounds}"):
                starts.append(start_seconds(ember))
                opened = own_bytes(ember.pid)
                ember.stop()
        ember.start()
        forget_bytes(ember, members)
        pull(ember, members)
        with stood_on(containerd, members[:1]), say.step(f"doing nothing for {idle_s:g} s"):
            time.sleep(SETTLED_S)
            woken = idle(ember, idle_s)
        back = []
        with stood_on(containerd, members):
            layers = lazy_layers(ember)
            for number in range(settings.rounds):
                with say.step(f"crash {number + 1} of {settings.rounds}, {len(layers)} layers"):
                    ember.kill()
                    back.append(answered_seconds(ember, layers[number * LAYERS]))
            after_crash = own_bytes(ember.pid)
            time.sleep(SETTLED_S)  # containerd dials again
    figure = partial(Figure, theirs=None)
    result.figures = [
        figure("memory, no image", "MB", empty / MB),
        figure(f"memory, {images} images pulled", "MB", after_pulls / MB, target=120),
        figure(f"memory, started with {images} images", "MB", opened / MB, target=120),
        figure(f"memory, {len(layers)} lazy layers restored", "MB", after_crash / MB, target=120),
        figure("wake-ups of all threads, idle", "1/s", sum(woken.values())),
        figure("wake-ups of the busiest thread, idle", "1/s", max(woken.values()), target=1),
        figure(f"start with {images} images", "s", statistics.median(starts), target=1),
        figure(f"{len(layers)} lazy layers after kill -9", "s", statistics.median(back), target=5),
    ]
    result.raw = {"starts_s": starts, "crashes_s": back, "wakes": woken, "lazy_layers": lazy}
    result.notes.append(
        f"Idle: {images} images known, {LAYERS} layers mounted lazily. After kill -9: from the new"
        " process to the end of a read that waited for it."
    )
    return result


CASE = Case(
    "daemon",
    "the daemon's memory, wake-ups, start, and return after a crash",
    run,
    "120 MB, one wake-up a second of a thread, a start in 1 s, 500 layers back within 5 s",
)

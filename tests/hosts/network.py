"""Hosts on one machine: namespaces with network, memory, name and processes of their own, and a switch.

    host 0: namespaces ── eth0 (TAP device) ──┐
    host 1: namespaces ── eth0 ───────────────┤ Switch: a thread of the test, which carries every frame,
    host 2: namespaces ── eth0 ───────────────┘ late or never where the test says so

A host has no way to another one but its card. Where its first process ends, all others end by SIGKILL, and
what was in its shared memory is gone. Making hosts takes root, Linux, `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_MOST_BYTES = 1 << 16
"""Of a frame."""
_READY = "ready"
_NAMES = Path("/", "etc", "hosts")
"""Where a program looks up the addresses of hosts."""
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


def why_not() -> str:
    """Return why hosts cannot be made on this machine; "" if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts take root on Linux"
    missing = [name for name in ("ip", "unshare", "nsenter", "mount") if shutil.which(name) is None]
    if missing or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return f"hosts take {', '.join(missing) or '/dev/net/tun'}"
    allowed = subprocess.run(["unshare", *_NAMESPACES, "--fork", "true"], capture_output=True, check=False)
    return "" if allowed.returncode == 0 else "namespaces cannot be made here"


class Switch:
    """Carries frames between cards in a thread: late by `delay` seconds, and a share `loss` of them never."""

    def __init__(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        self.delay, self.loss = delay, loss
        self.unplugged = set[int]()
        self.carried = 0
        """Frames so far."""
        self._cards: list[int] = []
        self._card_of: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._numbers, self._random = count(), random.Random(0)
        self._wake_up = os.eventfd(0, os.EFD_NONBLOCK)
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def add(self, card: int) -> int:
        """Add a TAP device, by its file; return its number."""
        os.set_blocking(card, False)
        self._cards.append(card)
        os.eventfd_write(self._wake_up, 1)
        return len(self._cards) - 1

    def unplug(self, number: int) -> None:
        """Pull a card's cable: nothing reaches it, and nothing leaves it."""
        self.unplugged.add(number)

    def plug_in(self, number: int) -> None:
        """Put a card's cable back."""
        self.unplugged.discard(number)
        os.eventfd_write(self._wake_up, 1)

    def close(self) -> None:
        """End the thread, and close the cards."""
        self._ends = True
        os.eventfd_write(self._wake_up, 1)
        self._thread.join()
        for card in (*self._cards, self._wake_up):
            os.close(card)

    def _run(self) -> None:
        while not self._ends:
            patience = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            plugged = [card for number, card in enumerate(self._cards) if number not in self.unplugged]
            for file in select.select([*plugged, self._wake_up], [], [], patience)[0]:
                if file == self._wake_up:
                    os.eventfd_read(file)
                else:
                    self._take(self._cards.index(file))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._waiting)
                self._give(target, frame)

    def _take(self, source: int) -> None:
        """Read a frame, note its sender, and queue it for its target, or for all where that is unknown."""
        try:
            frame = os.read(self._cards[source], _MOST_BYTES)
        except OSError:  # its host is gone
            self.unplug(source)
            return
        if source in self.unplugged or self._random.random() < self.loss:
            return
        self._card_of[frame[6:12]] = source
        target = self._card_of.get(frame[:6])
        for other in range(len(self._cards)) if target is None else (target,):
            if other != source:
                due = time.monotonic() + self.delay
                heapq.heappush(self._waiting, (due, next(self._numbers), other, frame))

    def _give(self, target: int, frame: bytes) -> None:
        if target in self.unplugged:
            return
        self.carried += 1
        with suppress(OSError):  # its queue is full, or its host is gone: as a lost frame
            os.write(self._cards[target], frame)


class Host:
    """A host: namespaces of its own, and their first process, by which it lives and dies."""

    def __init__(self, number: int, switch: Switch, names: Path) -> None:
        """`names`: the file that gives the address of each host."""
        self.name, self.address = f"host-{number}", address(number)
        self.switch, self._names, self._number = switch, names, number
        self.start()

    def start(self) -> None:
        """Start the host, with empty memory."""
        inside = (
            f"mount -t tmpfs tmpfs /dev/shm && mount --bind {self._names} {_NAMES} && hostname {self.name}"
            f" && echo {_READY} && exec sleep infinity"
        )
        self._first = subprocess.Popen(
            ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        with self._first.stdout as output:
            assert output.readline().strip() == _READY
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text().split()
        self._process = int(children[0])
        self._add_card()

    def _add_card(self) -> None:
        """Give the host a network card, and connect it to the switch."""
        card = os.open("/dev/net/tun", os.O_RDWR)
        name = f"p{os.getpid()}x{card}"
        fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
        _ip("link", "set", name, "netns", str(self._process), "name", "eth0")
        for words in (
            ("address", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "lo", "up"),
            ("link", "set", "eth0", "up"),
        ):
            assert self.run("ip", *words).returncode == 0
        self.card = self.switch.add(card)

    def unplug(self) -> None:
        """Pull the cable: nothing reaches the host, and nothing leaves it."""
        self.switch.unplug(self.card)

    def plug_in(self) -> None:
        """Put the cable back."""
        self.switch.plug_in(self.card)

    def vanish(self) -> None:
        """Cut the power: the cable is dead, and all processes and the memory of the host are gone."""
        self.unplug()
        self._first.kill()  # its child, the first process of the namespaces, is killed with it
        self._first.wait()

    def kill_programs(self) -> None:
        """End all programs on the host by SIGKILL; it keeps its memory."""
        self.run("sh", "-c", "kill -9 -1")

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["nsenter", "--target", str(self._process), *_NAMESPACES, "--", *map(str, words)]

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command on this host; return how it ended."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=False)

    def start_program(self, *words: str | Path) -> subprocess.Popen[str]:
        """Start a program on this host, whose output is read by the test."""
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def address(number: int) -> str:
    """Return the address of a host."""
    return f"10.77.0.{number + 1}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts(number: int, folder: Path, *, delay: float = 0.0, loss: float = 0.0) -> Iterator[Sequence[Host]]:
    """Give so many hosts, joined by a switch; end all their processes afterwards. `folder`: for names."""
    names = folder / "names"
    lines = [f"{address(one)} host-{one}" for one in range(number)]
    names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    with ExitStack() as stack:
        switch = Switch(delay=delay, loss=loss)
        stack.callback(switch.close)
        made = []
        for one in range(number):
            made.append(Host(one, switch, names))
            stack.callback(made[-1].vanish)
        yield made

"""Whether a server runs on this machine. Its address is no proof: a tunnel, a port forward or a container has one too.

It does where the process that listens can be seen, and it does the work itself: neither it nor a child of it lives in
another network, or holds a connection to anybody but each other. Who passes bytes on holds one (ssh, kubectl, socat,
docker-proxy, and proxies that keep theirs open). By Linux's /proc; where that does not tell, nothing is known.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_ESTABLISHED, _LISTENING = "01", "0A"
IP = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class _Socket:
    """A line of /proc/net/tcp; the ends are (address, port)."""

    local: tuple[IP, int]
    remote: tuple[IP, int]
    state: str
    inode: str


def runs_here(host: str, port: int) -> bool:
    """Whether who answers at this address is known to be a process of this machine."""
    return bool(serving_family(host, port))


def serving_family(host: str, port: int) -> set[int]:
    """The processes that answer at this address, and all that they started; empty where they are not known to be here.

    A process that passes on what it gets is seen while its connection is open: ask during or right after requests. It
    reads all that is open on the machine, which takes some milliseconds.
    """
    try:
        addresses = {_plain(ipaddress.ip_address(found[4][0])) for found in socket.getaddrinfo(host, port, type=1)}
        return set(map(int, _family(addresses, port))) if all(map(_is_own, addresses)) else set()
    except (OSError, ValueError):
        return set()


def _is_own(address: IP) -> bool:
    """Whether it is an address of this machine: only those can be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _family(addresses: set[IP], port: int) -> set[str]:
    """The listening processes with their children; empty where they are unknown, or pass on what they get."""
    sockets = list(_sockets())
    listening = [each for each in sockets if each.state == _LISTENING and each.local[1] == port]
    exact = {each.inode for each in listening if each.local[0] in addresses}
    wanted = exact or {each.inode for each in listening if each.local[0].is_unspecified}
    holders = _holders()
    if not wanted or not all(holders[inode] for inode in wanted):
        return set()
    family = _with_children({pid for inode in wanted for pid in holders[inode]})
    if any(os.readlink(PROC / pid / "ns/net") != os.readlink(PROC / "self/ns/net") for pid in family):
        return set()
    own = {each for each in sockets if each.state == _ESTABLISHED and holders[each.inode] & family}
    ends = {(each.local, each.remote) for each in own}
    serves_itself = all(each.local[1] == port or (each.remote, each.local) in ends for each in own)
    return family if serves_itself else set()


def _sockets() -> Iterator[_Socket]:
    for name in ("tcp", "tcp6"):
        file = PROC / "net" / name
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            yield _Socket(socket_end(fields[1]), socket_end(fields[2]), fields[3], fields[9])


def socket_end(text: str) -> tuple[IP, int]:
    """Parse an address like "0100007F:1F90": words of 4 bytes in the machine's order, then the port."""
    digits, _, port = text.partition(":")
    words = bytes.fromhex(digits)
    packed = b"".join(socket.htonl(int.from_bytes(words[i : i + 4])).to_bytes(4) for i in range(0, len(words), 4))
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(address: IP) -> IP:
    return getattr(address, "ipv4_mapped", None) or address


def process_ids() -> Iterable[str]:
    return filter(str.isdigit, os.listdir(PROC))


def _holders() -> defaultdict[str, set[str]]:
    """Sockets by inode: which processes hold them; of other users' processes only root is told."""
    holders: defaultdict[str, set[str]] = defaultdict(set)
    for pid in process_ids():
        with contextlib.suppress(OSError):  # another user's, or it has ended
            for descriptor in os.listdir(PROC / pid / "fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    kind, _, inode = os.readlink(PROC / pid / "fd" / descriptor).partition(":[")
                    if kind == "socket":
                        holders[inode.rstrip("]")].add(pid)
    return holders


def _with_children(pids: set[str]) -> set[str]:
    """These processes and all that they have started."""
    children: defaultdict[str, list[str]] = defaultdict(list)
    for pid in process_ids():
        with contextlib.suppress(OSError):
            children[(PROC / pid / "stat").read_text().rpartition(")")[2].split()[1]].append(pid)
    found = list(pids)
    for pid in found:  # it grows as we go
        found += [child for child in children[pid] if child not in pids]
    return set(found)

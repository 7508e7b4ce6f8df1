"""Hosts and addresses: how a site is reached, and which address of its host it listens on."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from stratafl.base.errors import InvalidInput

LOOPBACK = "127.0.0.1"
LONGEST = 253
LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def host(field: str, text: str, *, reachable: bool = True) -> str:
    """A host's name or address, an IPv6 one without brackets, or the complaint. `reachable`: that
    others call it."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        labels = bare.split(".")
        is_name = bare == text and len(bare) <= LONGEST and all(map(LABEL.fullmatch, labels))
        if not is_name or labels[-1].isdigit():
            wanted = "must be a host's name or address alone, such as edge.example.org, 192.0.2.7 or 2001:db8::7"
            raise InvalidInput(field, text, f"{wanted}, without http:// and without a port") from None
        return bare
    if address.is_multicast or "%" in bare or (bare != text and address.version == 4):
        raise InvalidInput(field, text, "must be the address of one host")
    if reachable and address.is_unspecified:
        raise InvalidInput(field, text, "is no address that children could call; to listen on all, name it in [bind]")
    return address.compressed


def own(host: str) -> str:
    """What a host that is reached by this name listens on: its own address, looked up where it
    starts."""
    return LOOPBACK if host.lower() == "localhost" else host


def joined(host: str, port: int) -> str:
    """The address of a port of a host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(address: str) -> tuple[str, int]:
    """Host and port of an address, an IPv6 host without its brackets."""
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port)


def bound(address: str) -> socket.socket:
    """A socket of this machine's with this address, which does not listen yet."""
    name, port = parted(address)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # a host's own name is often also its loopback's, where nobody else would reach it
        family, kind, protocol, _, place = min(found, key=lambda each: (is_loopback(str(each[4][0])), each[0]))
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
        except OSError:
            sock.close()
            raise
    except OSError as problem:
        why = problem.strerror or str(problem)
        if problem.errno != errno.EADDRINUSE:
            why += "; where a host listens on another address than it is reached by, [bind] of the topology names it"
        raise InvalidInput("listen", address, why) from None
    return sock


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

"""`deploy init`: from a topology to one folder per site, with certificates, keys and a start script."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stratafl.config import Config, read_toml
from stratafl.deploy import seal
from stratafl.deploy.assemble import study_of, training_of
from stratafl.deploy.job import Job
from stratafl.deploy.site import Site, slug, tree_of
from stratafl.errors import InvalidInput, number, unknown, whole
from stratafl.experiment import rules_of, schedule_of
from stratafl.flat import Flat
from stratafl.registry import rules_for
from stratafl.store import files, layout
from stratafl.tree import Tree

YEARS = 5
PORTS = 3
"""That a site may need: its SuperLink's two, and its SuperNode's inner one."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Topology:
    """A topology file: the run's config, and where its sites are."""

    path: Path
    config_path: Path
    config: Config
    base_port: int = 9400
    hosts: dict[str, str] = field(default_factory=dict)
    """By site: the name or address under which its children reach it; this machine unless given."""
    data: dict[str, str] = field(default_factory=dict)
    """By leaf: where its own data is, at its own host; its part of the config's data set unless given."""
    deadline: tuple[float | None, ...] = ()
    min_children: tuple[int, ...] = ()

    @staticmethod
    def load(path: Path) -> Topology:
        values = read_toml(path)
        known = ("config", "base_port", "hosts", "data", "deadline", "min_children")
        for key in values:
            if key not in known:
                raise unknown("topology key", key, known)
        if not isinstance(values.get("config"), str):
            raise InvalidInput("topology.config", values.get("config"), "must be the path of the run's config file")
        config_path = path.parent / values["config"]
        config = Config.load(config_path)
        tree = Tree.of(config.tree.shape)
        inner = [name for level in tree.names[:-1] for name in level]
        return Topology(
            path=path,
            config_path=config_path,
            config=config,
            base_port=whole("topology.base_port", values.get("base_port", 9400), at_least=1024, at_most=60000),
            hosts=_by_site(values, "hosts", inner, "must be a host's name or address"),
            data=_by_site(values, "data", tree.names[-1], "must be a path at the leaf's host"),
            deadline=tuple(
                None if each == 0 else number("topology.deadline", each, above=0)
                for each in _per_level("deadline", values.get("deadline", 0), tree.depth)
            ),
            min_children=tuple(
                whole("topology.min_children", each, at_least=1)
                for each in _per_level("min_children", values.get("min_children", 1), tree.depth)
            ),
        )


def _per_level(name: str, given: Any, depth: int) -> list[Any]:
    """One value per edge level, root first; a single one stands for all."""
    values = given if isinstance(given, list) else [given] * depth
    if len(values) != depth:
        raise InvalidInput(f"topology.{name}", given, f"needs one number per edge level, {depth} of them")
    return values


def _by_site(values: dict[str, Any], name: str, known: Sequence[str], wanted: str) -> dict[str, str]:
    """A table with one text for some of the sites."""
    given = values.get(name, {})
    if not isinstance(given, dict):
        raise InvalidInput(f"topology.{name}", given, f"must be a table, [{name}]")
    for site, text in given.items():
        if site not in known:
            raise unknown(f"topology.{name}", site, known)
        if not isinstance(text, str) or not text:
            raise InvalidInput(f"topology.{name}.{site}", text, wanted)
    return given


def provision(topology: Topology, out: Path) -> dict[str, Path]:
    """Write every site's folder; where each is."""
    if out.exists():
        raise InvalidInput("--out", out, "exists already: keys are made once")
    made = study_of(topology.config)
    flat, tree, inputs = made.simulation.flat, tree_of(topology.config), training_of(made).inputs
    job = layout.new_id()
    authority = Authority.new(f"stratafl {job}")
    _check(topology, tree, flat)
    numbered = [(level, number) for level in range(tree.depth + 1) for number in range(tree.sizes[level])]
    port = {where: topology.base_port + PORTS * i for i, where in enumerate(numbered)}
    node_keys = {where: ec.generate_private_key(ec.SECP384R1()) for where in numbered if where[0]}
    edge_keys = {where: seal.new_key() for where in numbered if where[0]}
    parts = zip(tree.names[-1], training_of(made).partition, strict=True)
    declared = [0 if name in topology.data else len(part) for name, part in parts]
    files.make_folder(out)
    os.chmod(out, 0o700)
    folders = {}
    for where in numbered:
        level, number = where
        name = tree.names[level][number]
        children = [] if level == tree.depth else [(level + 1, int(c)) for c in _children(tree, level, number)]
        parent = (level - 1, int(tree.parents[level][number])) if level else None
        host = topology.hosts.get(name, LOOPBACK)
        local = host == LOOPBACK
        site = Site(
            name=name,
            level=level,
            number=number,
            job=job,
            children=[tree.names[level + 1][child] for _, child in children],
            listen=f"{LOOPBACK if local else '0.0.0.0'}:{port[where]}" if children else "",
            public=f"{host}:{port[where]}" if children else "",
            parent="" if parent is None else _address(topology, tree, parent, port),
            inner_port=port[where] + 1,
            runtime_port=port[where] + 2,
            data=topology.data.get(name, "") if not children else "",
            inputs=list(inputs.shape[1:]),
            input_type=_type_name(inputs.dtype),
            classes=len(made.holdings.classes),
            parameters=flat.parameters,
            buffers=flat.buffers,
            dtype=_type_name(flat.dtype),
            samples=[declared[leaf] for leaf in np.flatnonzero(tree.ancestors(level) == number)],
            deadline=list(topology.deadline),
            min_children=list(topology.min_children),
        )
        folder = folders[name] = out / slug(name)
        folder.mkdir(mode=0o700)
        site.write(folder)
        shutil.copyfile(topology.config_path, folder / "config.toml")
        _secret(folder / "ca.pem", authority.pem, 0o644)
        certificate, key = authority.sign(name, [host, LOOPBACK, "localhost"])
        _secret(folder / "server.pem", certificate, 0o644)
        _secret(folder / "server.key", key)
        _secret(folder / "inner.key", secrets.token_hex(32).encode())
        if where in node_keys:
            _secret(folder / "node.key", _ssh_private(node_keys[where]))
            _secret(folder / "node.pub", _ssh_public(node_keys[where]), 0o644)
            _secret(folder / "up.key", edge_keys[where])
        if children:
            (folder / "down").mkdir()
            for child in children:
                its = slug(tree.names[child[0]][child[1]])
                _secret(folder / "down" / f"{its}.key", edge_keys[child])
                _secret(folder / "down" / f"{its}.pub", _ssh_public(node_keys[child]), 0o644)
        _start_script(folder)
    return folders


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(topology: Topology, tree: Tree, flat: Flat) -> None:
    """Refuse what cannot be deployed, before anything is written."""
    config = topology.config
    Job(
        name="",
        tree=tree,
        rules=rules_for(rules_of(config), tree.depth),
        schedule=schedule_of(config, tree.depth),
        participation=(),
        seed=0,
        rounds=1,
        parameters=flat.parameters,
        buffers=flat.buffers,
        dtype=flat.dtype,
    )


def _children(tree: Tree, level: int, number: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents[level + 1]) if parent == number]


def _address(topology: Topology, tree: Tree, where: tuple[int, int], port: dict[tuple[int, int], int]) -> str:
    return f"{topology.hosts.get(tree.names[where[0]][where[1]], LOOPBACK)}:{port[where]}"


def _start_script(folder: Path) -> None:
    text = (
        "#!/bin/sh\n"
        "# Starts this site; run it where its folder lies. SIGTERM stops it.\n"
        f'exec "${{PYTHON:-{sys.executable}}}" -m stratafl deploy site "$(dirname "$0")"\n'
    )
    _secret(folder / "start.sh", text.encode(), 0o755)


def _secret(path: Path, data: bytes, mode: int = 0o600) -> None:
    with files.create(path) as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)


def _ssh_private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def _ssh_public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def flower_key(ssh: bytes) -> bytes:
    """A node's public key the way Flower lists it."""
    key: Any = serialization.load_ssh_public_key(ssh)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Authority:
    """A certificate authority of one run; its key is forgotten once every site has its certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @staticmethod
    def new(name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP384R1())
        builder = _builder(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(
            key_cert_sign=True, crl_sign=True, digital_signature=True, content_commitment=False,
            key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
            decipher_only=False,
        )  # fmt: skip
        builder = builder.add_extension(usage, critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return Authority(key, builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256()))

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, name: str, hosts: list[str]) -> tuple[bytes, bytes]:
        """A server's certificate and its key."""
        key = ec.generate_private_key(ec.SECP384R1())
        issuer = self.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        names = [_general_name(host) for host in dict.fromkeys(hosts)]
        certificate = (
            _builder(name, str(issuer), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return certificate.public_bytes(serialization.Encoding.PEM), private


def _builder(name: str, issuer: str, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer[:64])]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

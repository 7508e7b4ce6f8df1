"""`deploy init`: from a topology to one folder per site, with certificates, keys and a start script."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stratafl.config import Config
from stratafl.deploy import seal, user_files
from stratafl.deploy.address import LOOPBACK, joined
from stratafl.deploy.assemble import study_of, training_of
from stratafl.deploy.bounds import largest_message
from stratafl.deploy.job import Job
from stratafl.deploy.site import TOPOLOGY, Site, slug, tree_of
from stratafl.deploy.topology import PORTS, Topology
from stratafl.deploy.user_files import Carried
from stratafl.errors import InvalidInput
from stratafl.experiment import Study, rules_of, schedule_of
from stratafl.flat import Flat
from stratafl.registry import rules_for
from stratafl.store import files, layout
from stratafl.store.inputs import Inputs, changes, in_short
from stratafl.tree import Tree

YEARS = 5


def provision(topology: Topology, out: Path) -> dict[str, Path]:
    """Write every site's folder; where each is. They get their place when all are complete: none is ever half made."""
    if out.exists() or out.is_symlink():
        raise InvalidInput("--out", out, "exists already: keys are made once")
    made, carried, largest = _made(topology)
    partial = out.with_name(f".{out.name}{files.PARTIAL}")
    files.make_folder(out.parent)
    files.remove(partial)  # of an attempt that was killed
    try:
        partial.mkdir(mode=0o700)
        folders = _fill(topology, made, carried, largest, partial)
        partial.rename(out)
        files.sync_folder(out.parent)
    except OSError as problem:
        files.remove(partial)
        raise files.unwritable(out, problem) from None
    except BaseException:
        files.remove(partial)
        raise
    return {name: out / folder for name, folder in folders.items()}


def _fill(topology: Topology, made: Study, carried: Carried, largest: int, out: Path) -> dict[str, str]:
    """Each site's folder in this one, by its name."""
    flat, tree, inputs = made.simulation.flat, tree_of(topology.config), training_of(made).inputs
    job = layout.new_id()
    authority = Authority.new(f"stratafl {job}")
    numbered = [(level, number) for level in range(tree.depth + 1) for number in range(tree.sizes[level])]
    port = {where: topology.base_port + PORTS * i for i, where in enumerate(numbered)}
    node_keys = {where: ec.generate_private_key(ec.SECP384R1()) for where in numbered if where[0]}
    edge_keys = {where: seal.new_key() for where in numbered if where[0]}
    parts = zip(tree.names[-1], training_of(made).partition, strict=True)
    declared = [topology.samples.get(name, 0) if name in topology.data else len(part) for name, part in parts]
    folders = {}
    for where in numbered:
        level, number = where
        name = tree.names[level][number]
        children = [] if level == tree.depth else [(level + 1, int(c)) for c in _children(tree, level, number)]
        parent = (level - 1, int(tree.parents[level][number])) if level else None
        host = topology.host(name)
        site = Site(
            name=name,
            level=level,
            number=number,
            job=job,
            children=[tree.names[level + 1][child] for _, child in children],
            listen=joined(topology.listens(name), port[where]) if children else "",
            public=joined(host, port[where]) if children else "",
            parent="" if parent is None else joined(topology.host(tree.names[parent[0]][parent[1]]), port[parent]),
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
            largest=largest,
            deadline=list(topology.deadline),
            min_children=list(topology.min_children),
            names=carried.names,
            files=carried.digests,
        )
        folders[name] = slug(name)
        folder = out / slug(name)
        folder.mkdir(mode=0o700)
        site.write(folder)
        shutil.copyfile(topology.config_path, folder / "config.toml")
        carried.write(folder)
        if site.is_root:
            found = {str(path): carried.digests[place] for place, path in carried.sources.items()}
            files.write_json(folder / TOPOLOGY, Inputs(topology.as_dict(), found)._asdict())
        _secret(folder / "ca.pem", authority.pem, 0o644)
        certificate, key = authority.sign(slug(name), [host, LOOPBACK, "localhost"])
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


def _made(topology: Topology) -> tuple[Study, Carried, int]:
    """The run as one process would simulate it, the user's files that it took, and the bytes of a message of it."""
    found = user_files.named(topology.config, topology.config_path.absolute().parent)
    config = user_files.renamed(topology.config, {text: str(path) for text, path in found.items()})
    user_files.import_from(*(path.parent for path in found.values() if path.suffix == ".py"))
    try:
        made = study_of(config)
        largest = largest_message(_job(config, made.simulation.flat)) + seal.SEAL
        return made, user_files.carried(config, found), largest
    finally:
        user_files.import_from()


def check_made_from(root: Path, topology: Topology) -> None:
    """Refuse to go on with folders that were made from something else, as if nothing had changed."""
    path = root / TOPOLOGY
    before = Inputs.read(path, files.read_json(path))
    changed = changes(before, Inputs(topology.as_dict(), Inputs.of({}, before.files).files))
    if changed:
        told = f"was made from another config or topology than {topology.path} is now: {in_short(changed)}"
        raise InvalidInput("--out", root.parent, f"{told}; name another folder")


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _job(config: Config, flat: Flat) -> Job:
    """What messages there are; what cannot be deployed is refused, before anything is written."""
    tree = tree_of(config)
    return Job(
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

"""`deploy init`: from a topology to one folder per site, with certificates, keys and a start
script."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from torch import Tensor

from stratafl.base import files
from stratafl.base.errors import InvalidInput
from stratafl.base.topology import Topology
from stratafl.core.flat_module import frozen_digest
from stratafl.data.inputs import NamedInputs
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.bounds import largest_message
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.sites import user_files
from stratafl.deploy.sites.address import LOOPBACK, joined
from stratafl.deploy.sites.assemble import reference_simulation
from stratafl.deploy.sites.site import FORMAT, HUGE_PAGES, TOPOLOGY, Site, slug, stored_topology, tree_of
from stratafl.deploy.sites.topology import PORTS, DeploymentTopology
from stratafl.deploy.sites.user_files import UserFiles
from stratafl.experiment import legacy
from stratafl.experiment.algorithm import client_update, rule_names, sync_schedule
from stratafl.experiment.experiment import SECTIONS, Experiment
from stratafl.experiment.toml import with_full_paths
from stratafl.rules.registry import rules_for
from stratafl.runs import format
from stratafl.runs.provenance import Provenance, changes, shorten
from stratafl.simulation.simulation import Simulation

SINCE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
"""A certificate is good for hosts whose clocks are behind, however far: some begin in 1970."""
YEARS = 5


def provision(topology: DeploymentTopology, out: Path) -> dict[str, Path]:
    """Write every site's folder; where each is. They get their place when all are complete: none is
    ever half made."""
    if out.exists() or out.is_symlink():
        raise InvalidInput("--out", out, "exists already: keys are made once")
    made, own_files, largest = _made(topology)
    files.make_folder(out.parent)
    with files.atomic_folder(out, mode=0o700) as partial:
        folders = _fill(topology, made, own_files, largest, partial)
    return {name: out / folder for name, folder in folders.items()}


def _fill(
    topology: DeploymentTopology, made: Simulation, own_files: UserFiles, largest: int, out: Path
) -> dict[str, str]:
    """Each site's folder in this one, by its name."""
    job = format.new_id()
    authority = Authority.new(f"stratafl {job}")
    sites = _sites(topology, made, own_files, largest, job)
    keys = {site.name: EdgeKeys.new() for site in sites if not site.is_root}
    for site in sites:
        folder = out / slug(site.name)
        folder.mkdir(mode=0o700)
        site.write(folder)
        shutil.copyfile(topology.config_path, folder / "config.toml")
        own_files.write(folder)
        if site.is_root:
            sources = {str(path): own_files.digests[place] for place, path in own_files.sources.items()}
            files.write_json(folder / TOPOLOGY, {"format": FORMAT, **Provenance(topology.as_dict(), sources)._asdict()})
        _write_secrets(folder, site, topology.host(site.name), authority, keys)
        _start_script(folder)
    return {site.name: slug(site.name) for site in sites}


def _sites(topology: DeploymentTopology, made: Simulation, own_files: UserFiles, largest: int, job: str) -> list[Site]:
    """What each node of the tree is told of itself and its neighbours."""
    flat, home, tree, inputs = made.flat, made.home, tree_of(topology.experiment), _one_input(made)
    numbered = [(level, number) for level in range(tree.depth + 1) for number in range(tree.sizes[level])]
    port = {where: topology.base_port + PORTS * i for i, where in enumerate(numbered)}
    sizes = zip(tree.names[-1], made.data.client_sizes, strict=True)
    declared = [topology.samples.get(name, 0) if name in topology.data else size for name, size in sizes]
    sites, frozen = [], frozen_digest(flat)
    for level, number in numbered:
        name, own_port = tree.names[level][number], port[level, number]
        children = [] if level == tree.depth else _children(tree, level, number)
        above = (level - 1, int(tree.parents[level][number])) if level else None
        site = Site(
            name=name,
            level=level,
            number=number,
            job=job,
            children=[tree.names[level + 1][child] for child in children],
            listen=joined(topology.listens(name), own_port) if children else "",
            public=joined(topology.host(name), own_port) if children else "",
            parent=joined(topology.host(tree.names[above[0]][above[1]]), port[above]) if above else "",
            inner_port=own_port + 1,
            runtime_port=own_port + 2,
            data=topology.data.get(name, "") if not children else "",
            inputs=list(inputs.shape[1:]),
            input_type=_type_name(flat.dtype if inputs.is_floating_point() else inputs.dtype),
            classes=made.data.outputs,
            parameters=home.parameters.shared_width,
            buffers=home.buffers.shared_width,
            dtype=_type_name(flat.dtype),
            samples=[declared[leaf] for leaf in np.flatnonzero(tree.ancestors(level) == number)],
            largest=largest,
            deadline=list(topology.deadline),
            min_children=list(topology.min_children),
            names=own_files.names,
            files=own_files.digests,
            share_errors=name in topology.share_errors,
            frozen=frozen,
        )
        sites.append(site)
    return sites


class EdgeKeys(NamedTuple):
    """What a child and its parent know each other by."""

    node: ec.EllipticCurvePrivateKey
    """The child's own, for Flower; its parent has the public half."""
    seal: bytes
    """What both seal their messages with."""

    @staticmethod
    def new() -> EdgeKeys:
        return EdgeKeys(ec.generate_private_key(ec.SECP384R1()), seal.new_key())


def _write_secrets(folder: Path, site: Site, host: str, authority: Authority, keys: Mapping[str, EdgeKeys]) -> None:
    """A site's certificate, and its keys to its parent and to each of its children; `keys` has each
    child's by name."""
    _secret(folder / "ca.pem", authority.pem, 0o644)
    certificate, key = authority.sign(slug(site.name), [host, LOOPBACK, "localhost"])
    _secret(folder / "server.pem", certificate, 0o644)
    _secret(folder / "server.key", key)
    _secret(folder / "inner.key", secrets.token_hex(32).encode())
    if site.name in keys:
        own = keys[site.name]
        _secret(folder / "node.key", _ssh_private(own.node))
        _secret(folder / "node.pub", _ssh_public(own.node), 0o644)
        _secret(folder / "up.key", own.seal)
    if site.children:
        (folder / "down").mkdir()
        for child in site.children:
            _secret(folder / "down" / f"{slug(child)}.key", keys[child].seal)
            _secret(folder / "down" / f"{slug(child)}.pub", _ssh_public(keys[child].node), 0o644)


def _made(topology: DeploymentTopology) -> tuple[Simulation, UserFiles, int]:
    """The run as one process would simulate it, the user's files that it took, and the bytes of a
    message of it."""
    folder = topology.config_path.absolute().parent
    found = user_files.named(topology.experiment, folder)
    experiment = Experiment.from_table(with_full_paths(topology.experiment.to_table(), folder))
    user_files.import_from(*(path.parent for path in found.values() if path.suffix == ".py"))
    try:
        made = reference_simulation(experiment)
        _one_input(made)
        largest = largest_message(_job(experiment, made)) + seal.SEAL
        return made, user_files.collected(experiment, found), largest
    finally:
        user_files.import_from()


def _one_input(made: Simulation) -> Tensor:
    """Some samples, as the model takes them, or the complaint."""
    inputs = made.data.inputs
    if isinstance(inputs, NamedInputs):
        raise InvalidInput("data inputs", list(inputs.named), "a deployed leaf's model takes one, which has no name")
    return inputs


def check_made_from(root: Path, topology: DeploymentTopology) -> None:
    """Refuse to go on with folders that were made from something else, as if nothing had
    changed."""
    stored = stored_topology(root)
    before = stored._replace(config=_compared(_by_present_keys(root / TOPOLOGY, stored.config)))
    changed = changes(before, _compared(topology.as_dict()))
    if changed:
        told = f"was made from another config or topology than {topology.path} is now: {shorten(changed)}"
        raise InvalidInput("--out", root.parent, f"{told}; name another folder")


def _compared(topology: Mapping[str, Any]) -> dict[str, Any]:
    """The topology without what its sites do not use: none keeps the state of a finished run."""
    config = dict(topology["config"])
    if isinstance(storage := config.get("storage"), Mapping):
        config["storage"] = {key: value for key, value in storage.items() if key != "keep_state"}
    return {**topology, "config": config}


def _by_present_keys(path: Path, stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored topology with the keys that this version has: another version's have no meaning
    here, and one that did not have a key went by what is now its default."""
    format.check_fields(path, stored, {"config": dict})
    usual = DeploymentTopology(path, path, Experiment()).as_dict()
    tables = _filled(legacy.current(stored["config"]), usual["config"])
    for name, section in SECTIONS.items():
        table = tables[name]
        if section.INLINE and isinstance(table, Mapping) and section.INLINE not in table:
            table = section.as_table(table)  # as in the first format, where parameters are in the table itself
        tables[name] = _filled(table, usual["config"][name])
    return {**_filled(stored, usual), "config": tables}


def _filled(stored: Any, usual: Mapping[str, Any]) -> Any:
    """The table with these keys and no others; what it does not have is as usual."""
    return {key: stored.get(key, value) for key, value in usual.items()} if isinstance(stored, Mapping) else stored


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _job(experiment: Experiment, made: Simulation) -> Job:
    """What messages there are; what cannot be deployed is refused, before anything is written."""
    tree = tree_of(experiment)
    return Job(
        name="",
        tree=tree,
        rules=rules_for(rule_names(experiment.method), tree.depth),
        schedule=sync_schedule(experiment.schedule, tree),
        participation=(),
        seed=0,
        rounds=1,
        parameters=made.home.parameters.shared_width,
        buffers=made.home.buffers.shared_width,
        dtype=made.flat.dtype,
        leaf=client_update(experiment),
    )


def _children(tree: Topology, level: int, number: int) -> list[int]:
    return [child for child, parent in enumerate(tree.parents[level + 1]) if parent == number]


def _start_script(folder: Path) -> None:
    name, value = HUGE_PAGES
    text = (
        "#!/bin/sh\n"
        "# Starts this site; run it where its folder lies. SIGTERM stops it.\n"
        f'export {name}="${{{name}:-{value}}}"\n'
        f'exec "${{PYTHON:-{sys.executable}}}" -m stratafl deploy site "$(dirname "$0")"\n'
    )
    _secret(folder / "start.sh", text.encode(), 0o755)


def _secret(path: Path, data: bytes, mode: int = 0o600) -> None:
    with files.create_anew(path) as file:
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
    """A certificate authority of one run; its key is forgotten once every site has its
    certificate."""

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
        .not_valid_before(SINCE)
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)

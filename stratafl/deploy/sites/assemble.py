"""Make a site's node of its folder, with its state from disk and its keys: ready to take sealed
messages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.base import files
from stratafl.core.flat_module import check_frozen
from stratafl.data.inputs import Pair
from stratafl.deploy.notes import boards
from stratafl.deploy.protocol import seal
from stratafl.deploy.protocol.children import Link
from stratafl.deploy.protocol.job import Job
from stratafl.deploy.protocol.messages import PROTOCOL
from stratafl.deploy.protocol.node import Aggregator, LeafNode, NodeState, Root, introduction
from stratafl.deploy.protocol.wire import array_bytes, encode, protocol_of, receive_bundle
from stratafl.deploy.sites import readmission, user_files
from stratafl.deploy.sites.fingerprint import made_of
from stratafl.deploy.sites.own_data import own_data
from stratafl.deploy.sites.rounds import RootRun
from stratafl.deploy.sites.site import Site, experiment_of, job_of, slug, stored_experiment
from stratafl.deploy.sites.state_file import Damaged, Durable
from stratafl.experiment.experiment import Experiment
from stratafl.simulation.build import build
from stratafl.simulation.deployed import RootSetup, leaf_trainer, part_of
from stratafl.simulation.simulation import Simulation


@dataclass
class Assembled:
    """One site with everything but its network."""

    folder: Path
    site: Site
    experiment: Experiment
    job: Job
    durable: Durable
    kept: NodeState | None

    @staticmethod
    def of(folder: Path) -> Assembled:
        site = Site.load(folder)
        user_files.check(folder, site.files)
        user_files.import_from(*([folder / user_files.CODE] if site.files else []))
        experiment = experiment_of(site, folder)
        told = made_of(folder, stored_experiment(folder), site.files)
        job = dataclasses.replace(job_of(site, experiment), made_of=told)
        durable = Durable(folder / "state", site.job)
        try:
            return Assembled(folder, site, experiment, job, durable, durable.read())
        except Damaged as problem:
            durable.show(doing="damaged", problem=str(problem))
            raise

    def key(self, name: str) -> bytes:
        return files.read_bytes(self.folder / name)

    def leaf(self) -> LeafNode:
        number = self.site.number
        data: Pair
        if self.site.data:
            data, outputs = own_data(self.site, self.folder), self.site.classes
        else:
            data, outputs = part_of(self.experiment, number)
        made = leaf_trainer(self.experiment, number, data, outputs)
        check_frozen(made.engine.training.flat, self.site.frozen)
        return LeafNode(self.job, number, made, len(data[1]), self.durable.write, self.kept)

    def aggregator(self, link: Link) -> Aggregator:
        self._tell(self.kept)
        level, number = self.site.level, self.site.number
        return Aggregator(self.job, level, number, link, self._save, self.kept, self._readmitted)

    def root(self, made: RootSetup, link: Link) -> Root:
        check_frozen(made.start.flat, self.site.frozen)
        self._tell(self.kept)
        return Root(self.job, *made.shared, link, self._save, self.kept, self._readmitted)

    def run_folder(self, made: RootSetup, root: Root) -> RootRun:
        """The root's own, as that of the run, brought to where its state is."""
        return RootRun(self.folder, self.site, stored_experiment(self.folder), made, root.line)

    def _save(self, kept: NodeState) -> None:
        """Keep a parent's state."""
        self.durable.write(kept)
        self._tell(kept)

    def _tell(self, kept: NodeState | None) -> None:
        """Tell the supervisor what only a parent knows: whose updates ever counted, and who is
        out."""
        if kept is None or kept.below is None:
            return
        out, children = readmission.out(self.site, kept), kept.below.children
        took_part = [name for name, child in zip(self.site.children, children, strict=True) if child.heard is not None]
        boards.own.put(took_part=took_part, out=out)
        readmission.fulfilled(self.folder, set(self.site.children) - out.keys())

    def _readmitted(self) -> list[str]:
        return readmission.requested(self.folder, self.site)

    def sealed(self, node: LeafNode | Aggregator, ended: Callable[[], None]) -> Callable[[bytes], bytes]:
        """What the node does with a sealed bundle: a sealed reply, or a refusal."""
        key = self.key("up.key")
        facts: dict[str, Any] = {"bytes_in": 0, "bytes_out": 0, "arrays_in": 0, "arrays_out": 0}

        def handle(request: bytes) -> bytes:
            opened = seal.WORK.open_request(key, request)
            if protocol_of(opened, self.job) not in (None, PROTOCOL):
                return seal.WORK.seal_reply(key, request, encode(introduction(self.job, self.site.name)))
            bundle = receive_bundle(opened, self.job)
            if bundle.begin is not None:
                step = bundle.begin.step
                facts.update(step=step, round=self.job.global_round(step) + 1)
                self.durable.show(**facts, doing="round")
            replied = node.handle(bundle)
            answer = encode(replied)
            reply = seal.WORK.seal_reply(key, request, answer)
            facts["bytes_in"] += len(request)
            facts["bytes_out"] += len(reply)
            facts["arrays_in"] += array_bytes(opened)
            facts["arrays_out"] += array_bytes(answer)
            facts["contact"] = time.time()
            doing = "refused: another config, code or protocol" if replied.made_of else "waiting"
            self.durable.show(**facts, doing="done" if bundle.end else doing)
            if bundle.end:
                ended()
            return reply

        return handle

    def child_keys(self) -> dict[str, bytes]:
        return {name: self.key(f"down/{slug(name)}.key") for name in self.site.children}

    def child_nodes(self) -> dict[str, bytes]:
        """Each child's public node key as it was registered."""
        return {name: files.read_bytes(self.folder / "down" / f"{slug(name)}.pub") for name in self.site.children}


def reference_simulation(experiment: Experiment) -> Simulation:
    """The run as one process would simulate it, with the engine every deployed leaf uses."""
    return build(experiment.replace(execution=experiment.execution.replace(engine="loop", device="cpu")))

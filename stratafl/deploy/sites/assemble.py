"""From a site's folder to its node, with its state from disk and its keys: ready to take sealed messages."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratafl.config import Config
from stratafl.deploy import seal, user_files
from stratafl.deploy.durable import Damaged, Durable
from stratafl.deploy.fingerprint import made_of
from stratafl.deploy.job import Job
from stratafl.deploy.messages import PROTOCOL
from stratafl.deploy.node import Aggregator, Kept, Leaf, Link, Root, introduction
from stratafl.deploy.own import own_engine
from stratafl.deploy.site import Site, config_of, job_of, slug
from stratafl.deploy.wire import array_bytes, encode, protocol_of, receive_bundle
from stratafl.engine.work import Training
from stratafl.experiment import Study, study
from stratafl.store import files


@dataclass
class Assembled:
    """One site with everything but its network."""

    folder: Path
    site: Site
    config: Config
    job: Job
    durable: Durable
    kept: Kept | None

    @staticmethod
    def of(folder: Path) -> Assembled:
        site = Site.load(folder)
        user_files.check(folder, site.files)
        user_files.import_from(*([folder / user_files.CODE] if site.files else []))
        config = config_of(site, folder)
        given = Config.load(folder / "config.toml")
        job = dataclasses.replace(job_of(site, config), made_of=made_of(folder, given, site.files))
        durable = Durable(folder / "state", site.job)
        try:
            return Assembled(folder, site, config, job, durable, durable.read())
        except Damaged as problem:
            durable.show(doing="damaged", problem=str(problem))
            raise

    def key(self, name: str) -> bytes:
        return files.read_bytes(self.folder / name)

    def leaf(self) -> Leaf:
        number = self.site.number
        if self.site.data:
            engine, samples = own_engine(self.config, self.site, self.folder)
        else:
            made = study_of(self.config)
            engine, samples = made.simulation.engine, len(training_of(made).partition[number])
        return Leaf(self.job, number, engine, samples, self.durable.write, self.kept)

    def aggregator(self, link: Link) -> Aggregator:
        return Aggregator(self.job, self.site.level, self.site.number, link, self.durable.write, self.kept)

    def root(self, made: Study, link: Link) -> Root:
        federation = made.simulation.federation
        start = federation.held[0][0], federation.held_buffers[0][0]
        return Root(self.job, *start, link, self.durable.write, self.kept)

    def sealed(self, node: Leaf | Aggregator, ended: Callable[[], None]) -> Callable[[bytes], bytes]:
        """What the node does with a sealed bundle: a sealed reply, or a refusal."""
        key = self.key("up.key")
        facts: dict[str, Any] = {"bytes_in": 0, "bytes_out": 0, "arrays_in": 0, "arrays_out": 0}

        def handle(request: bytes) -> bytes:
            opened = seal.open_request(key, request)
            if protocol_of(opened, self.job) not in (None, PROTOCOL):
                return seal.seal_reply(key, request, encode(introduction(self.job, self.site.name)))
            bundle = receive_bundle(opened, self.job)
            if bundle.begin is not None:
                step = bundle.begin.step
                facts.update(step=step, round=self.job.global_round(step) + 1)
                self.durable.show(**facts, doing="round")
            replied = node.handle(bundle)
            answer = encode(replied)
            reply = seal.seal_reply(key, request, answer)
            facts["bytes_in"] += len(request)
            facts["bytes_out"] += len(reply)
            facts["arrays_in"] += array_bytes(opened)
            facts["arrays_out"] += array_bytes(answer)
            facts["contact"] = time.time()
            doing = "refused: another config, code or version" if replied.made_of else "waiting"
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


def study_of(config: Config) -> Study:
    """The run as one process would simulate it, with the engine every deployed leaf uses."""
    return study(dataclasses.replace(config, run=dataclasses.replace(config.run, engine="loop", device="cpu")))


def training_of(made: Study) -> Training:
    return made.simulation.engine.training  # type: ignore[attr-defined]  # the loop has it

"""What could not be saved has not happened: a full disk, and states that were lost."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stratafl import InvalidInput
from stratafl.deploy.protocol.bounds import check_reply
from stratafl.deploy.protocol.job import Patience
from stratafl.deploy.protocol.messages import PROTOCOL, Begin, Bundle, Reply
from stratafl.deploy.protocol.node import NodeState
from stratafl.deploy.sites.state_file import Durable
from tests.deploy.protocol.fallible import Died, FallibleTree, undisturbed
from tests.deploy.trees import normed, simulation
from tests.flat import client_options


def test_a_kept_reply_of_an_older_protocol_is_repeated_in_this() -> None:
    """A parent would refuse it as a stranger's, and without a deadline wait for ever."""
    tree = FallibleTree(simulation("mtgc", 2))
    tree.root.greet()
    tree.root.one_round()
    kept = tree.kept["0/0"]
    assert kept.reply is not None and kept.reply.report is not None
    last = kept.reply.report.step - tree.job.every[2]
    tree.kept["0/0"] = NodeState(above=kept.above, reply=replace(kept.reply, protocol=PROTOCOL - 1))
    tree.restart("0/0")
    bundle = Bundle(tree.job.name, "0/0", begin=Begin(last, None, None, None, known=last))
    again = tree.nodes["0/0"].handle(bundle)
    assert again.protocol == PROTOCOL and again.report is not None and again.report.step == kept.reply.report.step
    check_reply(tree.job, 2, 0, bundle, again)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can become longer than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class OnDisk(FallibleTree):
    """A tree with one site on a real disk, which is full at some of its saves."""

    def __init__(self, folder: Path, name: str, full: set[int], crash: bool = False, **settings: Any):
        super().__init__(simulation("mtgc", settings.pop("depth", 2)), **settings)
        self.durable, self.name, self.full, self.crash = Durable(folder, "run"), name, full, crash
        self.saves, self.dies_next = 0, False
        self.watch()

    def watch(self) -> None:
        node = self.nodes[self.name]
        getattr(node, "node", node)._save = self.save

    def save(self, kept: NodeState) -> None:
        self.saves += 1
        if self.saves not in self.full:
            self.durable.write(kept)
            return
        self.dies_next = self.crash
        with full_disk():
            self.durable.write(kept)

    def asking(self, link: Any) -> Any:
        ask = super().asking(link)

        def patient(bundles: dict[str, Bundle], deadline: float | None) -> dict[str, Reply]:
            try:
                replies = ask(bundles, deadline)
            except InvalidInput:
                if deadline is not None:
                    others = {name: bundle for name, bundle in bundles.items() if name != self.name}
                    return patient(others, deadline) if len(others) < len(bundles) else {}
                return patient(bundles, deadline)
            if self.dies_next and self.name in replies:
                self.dies_next = False
                self.die()
            return replies

        return patient

    def die(self) -> None:
        """The process ends; the next one knows what is on the disk."""
        self.durable.close()
        self.durable = Durable(self.durable.folder, "run")
        kept = self.durable.read()
        self.kept.pop(self.name, None)
        if kept is not None:
            self.kept[self.name] = kept
        self.restart(self.name)
        self.watch()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("name", ["0", "0/1"])
@pytest.mark.parametrize("save", range(1, 8))
def test_a_site_whose_disk_is_full_is_asked_again_until_it_has_room(
    name: str, save: int, crash: bool, tmp_path: Path
) -> None:
    """Also where it dies right after its next reply."""
    tree = OnDisk(tmp_path, name, {save, save + 1}, crash)
    tree.run()
    assert tree.saves > save
    assert torch.equal(tree.model(), undisturbed())
    tree.durable.close()


def test_the_root_s_round_is_not_over_before_it_is_saved(tmp_path: Path) -> None:
    tree = OnDisk(tmp_path, "root", {3, 4})
    tree.root.greet()
    tree.root.one_round()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="cannot be written"):
            tree.root.one_round()
        assert tree.root.round == 1
    tree.die()
    while tree.root.round < tree.job.rounds:
        tree.root.one_round()
    assert torch.equal(tree.model(), undisturbed())
    tree.durable.close()


def test_a_site_whose_disk_stays_full_is_named_and_takes_part_again(tmp_path: Path) -> None:
    full = OnDisk(tmp_path, "1/2", {4, 5}, patience=Patience(deadline=9.0))
    dead = FallibleTree(simulation("mtgc", 2))
    told = []
    for tree in (full, dead):
        tree.root.greet()
        tree.root.one_round()
        if tree is dead:
            tree.nodes["1/2"].when = "before"
        told.append([tree.root.one_round()])
        if tree is dead:
            tree.nodes["1/2"].when = None
        told[-1].append(tree.root.one_round())
    assert told[0] == told[1] == [((), ("1/2", "1/2")), ((), ())]
    assert torch.equal(full.model(), dead.model())
    full.durable.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("rules", ["mtgc", "scaffold"])
@pytest.mark.parametrize("older", [False, True])
def test_a_leaf_that_lost_its_state_begins_anew_at_once(depth: int, rules: str, older: bool) -> None:
    """Under no deadline, too; and where its state is an older one, as from a backup."""
    tree = FallibleTree(simulation(rules, depth))
    name, sibling = (tree.job.tree.names[depth][number] for number in (0, 1))
    tree.root.greet()
    tree.root.one_round()
    backup = tree.kept[name]
    tree.root.one_round()
    tree.kept.pop(name)
    if older:
        tree.kept[name] = backup
    tree.restart(name)
    assert tree.root.one_round() == ((), ())
    tree.root.end()
    new, old = tree.kept[name].above, tree.kept[sibling].above
    assert new is not None and old is not None and new.begun == old.begun
    if depth < 3:
        assert (new.above is None) == (old.above is None)
        assert new.above is None or torch.equal(new.above, old.above)  # type: ignore[arg-type]
    assert torch.isfinite(tree.model()).all()


def lose_state_after(tree: FallibleTree, name: str, saves: int) -> None:
    """The site dies after so many more saves, once, and its disk with it."""
    node, left = tree.nodes[name].node, [saves]
    save = node._save

    def dying(kept: NodeState) -> None:
        save(kept)
        left[0] -= 1
        if left[0] < 0:
            del tree.kept[name]
            raise Died

    node._save, tree.revive = dying, True


@pytest.mark.parametrize("saves", range(4))
def test_a_leaf_that_lost_its_state_within_a_round_gets_the_corrections_from_above(saves: int) -> None:
    tree = FallibleTree(simulation("mtgc", 2))
    tree.root.greet()
    tree.root.one_round()
    lose_state_after(tree, "0/1", saves)
    for _ in range(2):
        assert tree.root.one_round() == ((), ())
        new, old = tree.kept["0/1"].above, tree.kept["0/0"].above
        assert new is not None and old is not None and new.above is not None and old.above is not None
        assert torch.equal(new.above, old.above)


@pytest.mark.parametrize("name", ["0", "0/0"])
@pytest.mark.parametrize("saves", range(3))
def test_an_aggregator_that_lost_its_state_begins_anew_with_the_next_round(name: str, saves: int) -> None:
    """Wherever in its round it was: what its children have done of it is not asked for again."""
    tree = FallibleTree(simulation("mtgc", 3))
    tree.root.greet()
    tree.root.one_round()
    lose_state_after(tree, name, saves)
    refused, absent = tree.root.one_round()
    assert refused == () and set(absent) == {name}
    assert tree.root.one_round() == ((), ())
    assert torch.isfinite(tree.model()).all()


@pytest.mark.parametrize("older", [False, True])
def test_of_an_older_state_a_leaf_keeps_what_only_it_has(older: bool) -> None:
    """The parameters that never leave it; its correction goes."""
    chain = client_options(0.05, momentum=0.5, optimizer_state="keep")
    tree = FallibleTree(simulation("mtgc", 2, model=normed, local_parameters="batch_norm", leaf=chain, batch=None))
    tree.root.greet()
    tree.root.one_round()
    backup = tree.kept["0/0"].above
    assert backup is not None
    tree.root.one_round()
    lost = tree.kept.pop("0/0")
    if older:
        tree.kept["0/0"] = NodeState(above=backup)
    tree.restart("0/0")
    seen: list[Any] = []
    train = tree.trainer.engine.train

    def noted(work: Any) -> Any:
        seen.append(work)
        return train(work)

    tree.trainer.engine.train = noted  # type: ignore[method-assign]
    tree.root.one_round()
    first = next(work for work in seen if work.clients == [0])
    own = backup.optimiser if older else tree.trainer.initial_local
    assert torch.equal(tree.trainer.local_parameters.parameters.local(first.model.take([0])), own["local.model"])
    assert not torch.equal(backup.optimiser["local.model"], tree.trainer.initial_local["local.model"])
    assert lost.above is not None and not first.corrections[-1].take([0]).any()

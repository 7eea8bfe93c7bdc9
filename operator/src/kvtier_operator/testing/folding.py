"""Folds plans over a world until it rests, with the operator dying wherever chance or a test wants. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_operator.planning.actions import Action, Emit, Plan, SaveLedger
from kvtier_operator.planning.plan import Builders, plan
from kvtier_operator.testing.referee import broken_promises
from kvtier_operator.testing.world import World
from kvtier_operator.testing.world_life import tick
from kvtier_operator.testing.world_records import Conflict, Faults


class BrokenPromise(AssertionError):
    """A plan ordered what was promised never to happen."""


class Restless(AssertionError):
    """The passes do not come to an end."""


@dataclass(slots=True)
class Fold:
    """Passes over one world.

    Attributes:
        world: that is acted upon.
        builders: of the plans.
        passes: so far.
        trace: what was done, a line a pass, for the message of a failure.
    """

    world: World
    builders: Builders
    passes: int = 0
    trace: list[str] = field(default_factory=list)

    def look(self) -> Plan:
        """The plan of this moment, judged."""
        observed = self.world.observe()
        made = plan(self.world.cluster, observed, self.builders)
        self.trace.append(f"{self.passes}: {' | '.join(map(_short, made.actions))}")
        if broken := broken_promises(
            self.world.cluster, observed, made.actions, self.builders.revision(self.world.cluster)
        ):
            raise BrokenPromise("\n".join((f"seed {self.world.seed}", *self.trace[-25:], *broken)))
        return made

    def step(self, cut: int | None = None) -> Plan:
        """One pass and one tick.

        Args:
            cut: the operator dies before the action of this number; None = by chance.
        """
        made = self.look()
        self.passes += 1
        try:
            if self._carry_out(made, cut):
                self.world.status = made.status
            else:
                self.trace.append("   the operator died")
        except Conflict as error:
            self.trace.append(f"   {error}")
        tick(self.world)
        return made

    def _carry_out(self, made: Plan, cut: int | None) -> bool:
        """Act in order; False when the operator died on the way."""
        for index, action in enumerate(made.actions):
            if cut == index or (cut is None and self.world.happens(self.world.faults.cut)):
                return False
            self.world.execute(action)
        return cut != len(made.actions)

    def run(self, passes: int) -> None:
        """So many passes, whatever happens."""
        for _ in range(passes):
            if self.world.gone:
                return
            self.step()

    def settle(self, passes: int = 200, quiet: int = 8) -> None:
        """Without any further fault, until so many passes in a row have nothing to do.

        Raises:
            Restless: after so many passes there is still something.
        """
        self.world.faults = Faults()
        rest = 0
        for _ in range(passes):
            if self.world.gone:
                return
            made = self.step()
            rest = 0 if self.world.moving or _acts(made) else rest + 1
            if rest >= quiet:
                return
        raise Restless("\n".join((f"seed {self.world.seed}", *self.trace[-25:])))


def _acts(made: Plan) -> bool:
    return any(not isinstance(action, Emit | SaveLedger) for action in made.actions)


def _short(action: Action) -> str:
    ref = getattr(action, "ref", "") or getattr(action, "name", "") or getattr(action, "pod", "")
    detail = getattr(action, "replicas", None)
    if detail is None and hasattr(action, "manifest"):
        detail = action.manifest.get("spec", {}).get("replicas")
    word = getattr(action, "reason", "")
    return " ".join(str(part) for part in (type(action).__name__, ref, word, detail) if part not in ("", None))

"""What the loss takes that the program makes of the model's output, as its steps show it.

No dry run sees it, so cross entropy is foreseen. Where a step takes more, plans have room for that; where enough of them take
less, it is what they took that counts, until a step is refused that counted on it. What is more or less goes with the outputs of
a batch; what was foreseen does not, as gradients of what is behind the last block are among it.
"""

from __future__ import annotations

from ..dryrun.phases import SMALL_UNSEEN_BYTES, DryRun

#: Steps that show that a loss takes less than cross entropy, before plans count on it.
LIGHT_STEPS = 3


class Losses:
    """Of one session. known: a step was made of the batch that was planned for."""

    def __init__(self) -> None:
        self.known = False
        self._more, self._of = 0, 0  # what the loss takes beyond `DryRun.loss_bytes`, made of so many bytes of outputs
        self._light: list[int] = []  # likewise, in steps that may show that it takes less than was foreseen
        self._may_be_light = True  # until a step was refused that counted on it
        self._beyond_known = False  # one was refused when the loss was known before

    def note_first(self, loss_bytes: int, run: DryRun) -> bool:
        """A step was made of the batch that was planned for, the first of all or since one was refused, with so much for the
        loss. Returns whether that is what plans count on; else steps differ, and it was another one that was refused."""
        more = loss_bytes - run.loss_bytes
        tells = not self._beyond_known or more > self._more
        if tells:
            self._more, self._of = more, run.outside_bytes
        self.known, self._beyond_known = True, False
        return tells

    def note_anew(self, before: DryRun, run: DryRun) -> None:
        """The batch was foreseen anew: what the loss takes is as it was."""
        more = before.loss_bytes - run.loss_bytes
        if self._of:
            self._more, self._light = self._more + more, [light + more for light in self._light]

    def note_light(self, loss_bytes: int, run: DryRun) -> None:
        """A further step of it was made that may show that the loss takes less than was foreseen."""
        if not (loss_bytes and run.outside_bytes and self._of and self._may_be_light and len(self._light) < LIGHT_STEPS):
            return
        self._light.append(-((run.loss_bytes - loss_bytes) * self._of // run.outside_bytes))
        most = max(self._more, *self._light)
        self._may_be_light = most < 0
        self._more = most if self._may_be_light else self._more

    def note_refused(self, more_bytes: int, run: DryRun | None) -> int:
        """A step was refused, for want of so much more than was planned; returns how much of that is not the loss's, which is
        foreseen as before from here on where plans counted on less."""
        if run is not None and (light := self.more_than(run)) < 0:
            self._may_be_light, more_bytes = False, max(more_bytes + light, 0)
        self._beyond_known |= self.known
        self.known = False
        return more_bytes

    def more_than(self, run: DryRun) -> int:
        """What the loss takes beyond what this dry run has foreseen; below 0: less, as enough steps have shown."""
        more = self._more if run.loss_bytes else 0
        if run.outside_bytes and self._of:
            more = -(-more * run.outside_bytes // self._of)
        if more < 0 and not (run.outside_bytes and self._may_be_light and len(self._light) == LIGHT_STEPS):
            return 0
        return more if abs(more) > SMALL_UNSEEN_BYTES else 0  # each plan has room for that

"""What ``check --prove`` and ``check --save`` do with the values that were kept."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosscurrent.cli.console import progress
from crosscurrent.files import in_one_act

if TYPE_CHECKING:
    from crosscurrent.races.findings import Finding
    from crosscurrent.races.watch import Watch
    from crosscurrent.schedules import Witness
    from crosscurrent.schedules.proving import Proving

_CHECK = 3
"""Runs that it takes to see whether program order gives the same values again, once all is proven."""


class Proof:
    """The proofs of one run, if anybody asked for them."""

    def __init__(
        self, proving: Proving | None, *, saves_to: str | None, path: Path | None, shows: bool
    ) -> None:
        """``saves_to`` is the file for the program as the user named it, ``path`` where it really is;
        ``shows`` says whether witnesses are wanted, or only the program."""
        self._proving = proving
        self._saves_to = saves_to
        self._path = path
        self._shows = shows
        self.remarks: list[str] = []
        """What a person has to know about them, one paragraph each."""
        self.not_saved = ""
        """Why the program could not be saved."""

    @property
    def replay_command(self) -> str:
        """The command that runs a schedule of this program, but for the schedule; empty without a file."""
        if self._saves_to is None or self.not_saved:
            return ""
        return shlex.join(["crosscurrent", "replay", self._saves_to])

    @property
    def program_file(self) -> str | None:
        """Where the program was saved."""
        return None if self.not_saved else self._saves_to

    @property
    def witnesses(self) -> Mapping[str, Witness]:
        """What the findings led to, by their ids."""
        return {} if self._proving is None or not self._shows else self._proving.witnesses

    def name(self, namespace: Mapping[str, object]) -> None:
        """The program ended with these variables: its values are told by their names."""
        if self._proving is None:
            return
        from crosscurrent.schedules.naming import tensors_of

        for name, tensor in tensors_of(namespace).items():
            # A tensor of a kind that cannot be kept (sparse, say) is told by where it was allocated.
            with contextlib.suppress(Exception):
                self._proving.name({name: tensor})

    def save(self) -> None:
        """Write the program, if it is wanted. What hinders that is a remark, and costs no verdict."""
        if self._proving is None or self._path is None:
            return
        from crosscurrent.schedules import save

        try:
            with progress(transient=True, share=True) as bar, in_one_act(self._path) as path:
                told = partial(bar.count, bar.begin("save program", total=None))
                save(self._proving.program, path, told=told)
        except (ValueError, OSError) as error:  # something that lives in this process only; a full disk
            self.not_saved = str(error)
            self.remarks.append(f"the program was not saved: {error}")

    def findings(self, watch: Watch) -> list[Finding]:
        """The findings of the run, with witnesses if these are wanted."""
        found = watch.findings
        if self._proving is None or not self._shows or not found:
            return found
        proven: list[Finding] = []
        try:
            with progress() as bar:
                task = bar.begin(_now_proven(found, proven), total=None)
                for finding in self._proving.prove(
                    told=lambda done, most: bar.count(task, done, most + _CHECK)
                ):
                    proven.append(finding)
                    bar.update(task, description=_now_proven(found, proven))
                self.remarks += self._proving.unfaithful()
                bar.advance(task, _CHECK)
        except KeyboardInterrupt:
            self.remarks.append(
                f"interrupted: {len(found) - len(proven)} of {len(found)} races are not proven"
            )
        return proven + found[len(proven) :]


def _now_proven(found: Sequence[Finding], proven: Sequence[Finding]) -> str:
    return f"prove race {min(len(proven) + 1, len(found))} of {len(found)}"


def proof_as_json(document: Mapping[str, Any], findings: Sequence[Finding], proof: Proof) -> dict[str, Any]:
    """What the proofs add to the document of a check; see docs/json.md."""
    listed = [
        shown
        | {
            "witness": finding.witness,
            "schedule": finding.schedule,
            "proof": _witness(proof.witnesses.get(finding.id), proof.replay_command),
        }
        for shown, finding in zip(document["findings"], findings, strict=True)
    ]
    return {"findings": listed, "program_file": proof.program_file, "remarks": list(proof.remarks)}


def _witness(witness: Witness | None, replay: str) -> dict[str, Any] | None:
    if witness is None:
        return None
    return {
        "proven": witness.proven,
        "changes": [
            {
                "name": change.name,
                "what": change.what.value,
                "elements": change.elements,
                "total": change.total,
                "nan": change.nan,
                "distance": change.distance if math.isfinite(change.distance) else None,
            }
            for change in witness.changes
        ],
        "failure": None if witness.failure is None else str(witness.failure),
        "unproven": witness.unproven or None,
        "replay": f"{replay} {witness.schedule}" if replay and witness.proven else None,
    }

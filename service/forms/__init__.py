"""A post as it was decoded -> Draft: one small function a form, each to the same in-memory record.

    per datum   [{input_ids, loss_fn_inputs}, ...]     tensors of one datum each
    JSON        the same with lists                    made arrays, then as per datum
    columnar    lengths, columns                       one tensor a key over all datums
    slim        columnar, targets implied by the ids   last_targets [N] beside them

Checks the form, and each datum against what the run's schema says of its keys. A fault of one datum
names its place in the body; under skip that datum is left out of the draft. Values are ingest.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.schemas.errors import InvalidDatums
from headrace.schemas.wire import WIRE_VERSION
from headrace.service.body import JsonPost, MsgpackPost
from headrace.service.findings import Findings
from headrace.service.forms.columnar import COLUMNAR_ONLY, Columnar
from headrace.service.forms.entries import IDS, stream_specs
from headrace.service.forms.listed import Listed, tensors_of
from headrace.service.records import Draft, RunSchema
from headrace.service.settings import Limits, Stream

__all__ = ["IDS", "Forms", "group_ids_of", "stream_specs"]


class Forms:
    """Turns bodies into drafts for one run: knows the limits and the named streams."""

    def __init__(self, limits: Limits, streams: Mapping[str, Stream]) -> None:
        self._listed, self._columnar = Listed(limits, streams), Columnar(limits, streams)

    def draft(
        self, body: MsgpackPost | JsonPost, schema: RunSchema | None, findings: Findings
    ) -> Draft:
        """The draft of the datums without a fault. Raises InvalidDatums as `findings` settles."""
        if body.version != WIRE_VERSION:
            findings.add(None, "version", "version", body.version, WIRE_VERSION)
        if isinstance(body, JsonPost):
            datums = [tensors_of(datum) for datum in body.datums]
            draft = self._listed.draft(body, datums, schema, findings)
        elif (body.datums is None) == (body.columns is None):
            got = "neither" if body.datums is None else "both"
            findings.add(None, "datums", "form", got, "exactly one of datums and columns")
            draft = None
        elif body.datums is not None:
            for name in COLUMNAR_ONLY:
                if getattr(body, name) is not None:
                    findings.add(None, name, "form", "present", "only beside columns")
            draft = self._listed.draft(body, body.datums, schema, findings)
        else:
            draft = self._columnar.draft(body, schema, findings)
        findings.settle()
        if draft is None:
            raise InvalidDatums(findings.errors)
        return draft


def group_ids_of(body: MsgpackPost | JsonPost) -> list[tuple[str | None, int]]:
    """(group_id, group_size or 0) of every datum of a body, faulty ones included."""
    if body.datums is not None:
        return [(datum.group_id, datum.group_size or 0) for datum in body.datums]
    count = len(body.group_ids or body.group_sizes or ())
    names = body.group_ids or [None] * count
    sizes = body.group_sizes or [None] * count
    return [(name, size or 0) for name, size in zip(names, sizes, strict=True)]

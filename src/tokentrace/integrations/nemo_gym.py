"""Store NeMo Gym's token capture: a rollout is a session, a call a turn."""

from contextlib import suppress
from typing import Any

from ..store.store import Conflict, Label, SessionInfo, State, StoreError, TurnRecord, open_store
from .nemo_items import full_prompts

try:
    from nemo_gym.token_id_capture.lineage import RolloutLineage
    from nemo_gym.token_id_capture.protocols import LineageMatch, LineageResolution, TokenCaptureSnapshot
    from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, compute_digest
except ImportError as error:
    raise ImportError(f"this needs NeMo Gym: pip install nemo-gym ({error})") from error

_MOST_ROLLOUTS = 4096


class TokenStore:
    """NeMo Gym's ``TokenSink``, ``TokenSource`` and ``LineageResolver``."""

    def __init__(self, store: str) -> None:
        if not store or store == ":memory:":
            raise StoreError("sink and resolver share one store: give a path or a postgresql:// URL")
        self._store = open_store(store)
        self._lineages: dict[str, tuple[RolloutLineage, list[int]]] = {}

    def __repr__(self) -> str:
        return f"TokenStore({self._store.where!r})"

    async def put(self, entry: TokenEntry) -> None:
        """Store a call. Raises Conflict if its id has a different one, and Closed if frozen."""
        id, call = entry.rollout_id, entry.model_call_id
        payload = entry.model_dump_json().encode()
        session = await self._session(id)
        while True:
            if (number := await self._store.turn_named(id, call)) is not None:
                if (await anext(self._store.turns(id, number))).records != (payload,):
                    raise Conflict(
                        f"call {call!r} of rollout {id!r} is already stored, with different data"
                    )
                return
            sampled = len(entry.generation_token_ids)
            turn = TurnRecord(session.turns, session.records, (payload,), {}, sampled=sampled)
            with suppress(Conflict):  # another client was faster: look again
                await self._store.append(id, turn, request=call, names=[call])
                return
            session = await self._session(id)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Record a call. Without its `put`, the rollout is incomplete."""
        await self._session(rollout_id)
        await self._store.begin(rollout_id, model_call_id, {})

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record a lost call. Snapshots get a new version."""
        await self._session(rollout_id)
        await self._store.label(rollout_id, [Label(f"incomplete {model_call_id}", True)])

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        await self._session(rollout_id)
        await self._store.set_state(rollout_id, State.SEALED)
        entries = tuple([_entry(turn) async for turn in self._store.turns(rollout_id)])
        marks = len(await self._store.labels(rollout_id))
        is_incomplete = bool(marks or await self._store.incomplete(rollout_id))
        return TokenCaptureSnapshot(
            rollout_id, entries, is_incomplete, f"{rollout_id} sealed", version=marks
        )

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Delete a frozen rollout's calls; False if it has changed."""
        session = await self._store.session(rollout_id)
        if session is None or session.state is not State.SEALED or snapshot_id != f"{rollout_id} sealed":
            return False
        if len(await self._store.labels(rollout_id)) != version:
            return False
        self._lineages.pop(rollout_id, None)
        await self._store.set_state(rollout_id, State.DROPPED)
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """The call that a request continues, by NeMo Gym's rules."""
        lineage = await self._refreshed(rollout_id)
        status, node, reason = lineage.resolve_node(request_items)
        if status != ParentResolutionStatus.RESOLVED:
            return LineageResolution(status, reason=reason)
        chain = [node]
        while chain[-1].prompt_is_delta and chain[-1].parent_call_id in lineage.by_call_id:
            chain.append(lineage.by_call_id[chain[-1].parent_call_id])
        entries = [_entry(await anext(self._store.turns(rollout_id, one.entry_offset))) for one in chain]
        prompts = full_prompts(entries)
        tokens = [*prompts.get(node.call_id, ()), *entries[0].generation_token_ids]
        if compute_digest(tokens) != node.digest:
            return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason="digest_mismatch")
        match = LineageMatch(node.call_id, tuple(tokens), node.digest, prev_len=node.cum_len)
        return LineageResolution(ParentResolutionStatus.RESOLVED, match)

    def is_process_shared(self) -> bool:
        return True

    async def close(self) -> None:
        await self._store.close()

    async def _session(self, id: str) -> SessionInfo:
        return await self._store.create(SessionInfo(id, State.OPEN, 0.0, {"written by": "NeMo Gym"}))

    async def _refreshed(self, id: str) -> RolloutLineage:
        lineage, numbers = self._lineages.pop(id, (RolloutLineage(), []))
        self._lineages[id] = lineage, numbers  # the most recently used is the last
        while len(self._lineages) > _MOST_ROLLOUTS:
            del self._lineages[next(iter(self._lineages))]
        async for turn in self._store.turns(id, len(numbers)):
            if turn.number == len(numbers):  # another task may have read it meanwhile
                lineage.add_entry(_entry(turn), store_tokens=False, entry_offset=turn.number)
                numbers.append(turn.number)
        return lineage


def _entry(turn: TurnRecord) -> TokenEntry:
    return TokenEntry.model_validate_json(turn.records[0])

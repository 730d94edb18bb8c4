"""Policies and placement against a slow, obvious reference that knows which token is in which slot.

The reference keeps a Python list of token positions for each sequence and group. A policy never sees
it; what a policy decided is read off a cache whose entries are the positions of their tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from crosscurrent.kvcache.names import CacheConfig, PolicyKind
from crosscurrent.kvcache.placement import Eviction, GroupedEviction, SharedEviction
from crosscurrent.kvcache.policies import H2O, Dense, LastRecent, Policy, make_policy
from crosscurrent.operators.rows import slot_dtype

BATCH, GROUPS = 2, 2
ROWS = [(b, g) for b in range(BATCH) for g in range(GROUPS)]
CPU = torch.device("cpu")


class CacheMachine(RuleBasedStateMachine):
    """Chunks of any length go in, and from time to time another sequence starts."""

    @initialize(
        kind=st.sampled_from([PolicyKind.LASTREC, PolicyKind.H2O]),
        length=st.integers(1, 12),
        grace=st.tuples(st.integers(0, 11), st.integers(0, 11)),
        normalize=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(
        self, kind: PolicyKind, length: int, grace: tuple[int, int], normalize: bool, seed: int
    ) -> None:
        h2o = kind is PolicyKind.H2O
        first = min(grace[0], length - 1)
        recent = min(grace[1], length - 1 - first) if h2o else 0
        self.config = CacheConfig(
            policy=kind,
            cache_length=length,
            init_grace_tokens=first,
            grace_period=recent,
            normalize_scores=h2o and normalize,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.length, self.first, self.recent = length, first, recent
        self.policy = make_policy(self.config, 0)
        self.restart()

    def restart(self) -> None:
        self.policy.reset(BATCH, GROUPS, CPU)
        self.cache = torch.full((BATCH, GROUPS, self.length, 1), -1.0)
        self.seen = 0
        self.kept: dict[tuple[int, int], list[int]] = {row: [] for row in ROWS}
        self.scores: dict[tuple[int, int], dict[int, float]] = {row: {} for row in ROWS}
        self.last: Eviction | None = None

    @property
    def filled(self) -> int:
        return len(self.kept[0, 0])

    def expected_victims(self, row: tuple[int, int], count: int) -> set[int]:
        """Who should go, by the words of the rules."""
        candidates = [p for p in self.kept[row] if p >= self.first]
        if self.config.policy is PolicyKind.LASTREC:
            return set(sorted(candidates)[:count])
        candidates = [p for p in candidates if p < self.seen - self.recent]
        divisor = (lambda p: self.seen - p) if self.config.normalize_scores else (lambda p: 1)
        return set(sorted(candidates, key=lambda p: self.scores[row][p] / divisor(p))[:count])

    @rule(data=st.data())
    def place_a_chunk(self, data: st.DataObject) -> None:
        grace = min(self.first + self.recent, self.filled)
        length = data.draw(st.integers(1, self.length - grace if self.filled else self.length))
        before = self.cache.clone()
        victims: dict[tuple[int, int], set[int]] = {}
        count = max(0, self.filled + length - self.length)
        for row in ROWS:
            victims[row] = self.expected_victims(row, count)
            assert len(victims[row]) == count
        self.last = eviction = self.policy.place(length)
        new = torch.arange(self.seen, self.seen + length, dtype=torch.float32)
        new = new.view(1, 1, -1, 1).expand(BATCH, GROUPS, -1, -1)
        eviction.place_(self.cache, new)
        self.seen += length
        for row in ROWS:
            were, are = (
                set(cache[row][:filled, 0].int().tolist())
                for cache, filled in ((before, eviction.filled_before), (self.cache, eviction.filled_after))
            )
            gone = were - are
            assert gone == victims[row]
            self.kept[row] = [p for p in self.kept[row] if p not in gone]
            self.kept[row] += range(self.seen - length, self.seen)
        assert (eviction.num_evicted, eviction.filled_after) == (count, self.filled)
        if count:
            self.check_slots(eviction, before, victims)
        self.observe(eviction)

    def check_slots(
        self, eviction: Eviction, before: Tensor, victims: dict[tuple[int, int], set[int]]
    ) -> None:
        """The list of slots says the same: whose they were, and that the tail's entries are there now."""
        stacked = eviction.stack_slots([eviction], torch.arange(self.length))
        assert stacked.shape[1] == 1
        slots = stacked[:, 0].long().expand(BATCH, GROUPS, -1)
        for row in ROWS:
            assert set(before[row][slots[row], 0].int().tolist()) == victims[row]
            for source, slot in enumerate(slots[row].tolist(), start=eviction.tail.start):
                if slot < eviction.tail.start:
                    assert self.cache[row][slot, 0] == before[row][source, 0]
                else:
                    assert slot == source

    def observe(self, eviction: Eviction) -> None:
        """Give every slot a weight; the reference adds it to the token that it finds there."""
        weights = torch.rand(BATCH, GROUPS, self.filled, generator=self.generator)
        self.policy.observe(eviction, weights)
        for row in ROWS:
            for slot, position in enumerate(self.cache[row][: self.filled, 0].int().tolist()):
                scores = self.scores[row]
                scores[position] = scores.get(position, 0.0) + weights[row][slot].item()

    @rule()
    def start_another_sequence(self) -> None:
        self.restart()

    @invariant()
    def occupied_slots_hold_the_kept_tokens(self) -> None:
        if not hasattr(self, "kept"):
            return
        for row in ROWS:
            assert sorted(self.cache[row][: self.filled, 0].int().tolist()) == sorted(self.kept[row])

    @invariant()
    def the_newest_are_at_the_tail(self) -> None:
        last = getattr(self, "last", None)
        if last is None:
            return
        for row in ROWS:
            newest = sorted(self.kept[row])[-last.chunk_length :]
            assert self.cache[row][last.tail, 0].int().tolist() == newest


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=400, stateful_step_count=25, deadline=None)


def drive(policy: Policy, lengths: list[int], weights: list[list[float]] | None = None) -> list[list[int]]:
    """The positions in the slots of the one sequence and group after each chunk."""
    policy.reset(1, 1, CPU)
    cache, seen, result = torch.full((1, 1, 64, 1), -1.0), 0, []
    for i, length in enumerate(lengths):
        eviction = policy.place(length)
        new = torch.arange(seen, seen + length, dtype=torch.float32).view(1, 1, -1, 1)
        eviction.place_(cache, new)
        seen += length
        result.append(cache[0, 0, : eviction.filled_after, 0].int().tolist())
        if weights is not None:
            policy.observe(eviction, torch.tensor(weights[i]).view(1, 1, -1))
    return result


class TestByHand:
    def test_dense_appends(self) -> None:
        assert drive(Dense(5), [2, 1, 2])[-1] == [0, 1, 2, 3, 4]

    def test_lastrec_moves_the_tail_into_the_place_of_the_oldest(self) -> None:
        after = drive(LastRecent(6), [6, 2, 2, 2])
        assert after[1:] == [[4, 5, 2, 3, 6, 7], [4, 5, 6, 7, 8, 9], [8, 9, 6, 7, 10, 11]]

    def test_lastrec_with_a_chunk_that_replaces_its_own_tail(self) -> None:
        assert drive(LastRecent(4), [4, 3])[-1] == [3, 4, 5, 6]

    def test_lastrec_replaced_as_a_whole(self) -> None:
        assert drive(LastRecent(3), [3, 3])[-1] == [3, 4, 5]

    def test_lastrec_with_evicted_slots_of_the_tail_that_are_not_in_order_of_age(self) -> None:
        # All but 11 go. The oldest of the tail, slots 1 .. 7, are in slots 4 and 5, then come 1 .. 3.
        after = drive(LastRecent(8), [8, 2, 2, 7])
        assert after[2:] == [[6, 7, 8, 9, 4, 5, 10, 11], [11, 12, 13, 14, 15, 16, 17, 18]]

    def test_lastrec_keeps_the_first_ones(self) -> None:
        after = drive(LastRecent(4, init_grace_tokens=1), [4, 3, 3, 3])
        assert after[-1] == [0, 10, 11, 12]

    def test_h2o_evicts_the_least_attended(self) -> None:
        weights = [[0.5, 0.1, 0.2, 0.4], [0.0] * 4]
        assert drive(H2O(4), [4, 2], weights)[-1] == [0, 3, 4, 5]

    def test_h2o_pairs_an_evicted_slot_of_the_tail_with_itself(self) -> None:
        policy = H2O(4)
        policy.reset(1, 1, CPU)
        policy.observe(policy.place(4), torch.tensor([[[0.1, 0.5, 0.4, 0.2]]]))
        eviction = policy.place(2)
        assert isinstance(eviction, GroupedEviction)
        # Tail slots 2 and 3: the entry of 2 moves to 0, and 3 is evicted where it is.
        assert eviction.slots_BGm.tolist() == [[[0, 3]]]

    def test_h2o_spares_the_newest(self) -> None:
        weights = [[0.5, 0.4, 0.1, 0.2], [0.0] * 4]
        assert sorted(drive(H2O(4, grace_period=2), [4, 1], weights)[-1]) == [0, 2, 3, 4]
        assert sorted(drive(H2O(4), [4, 1], weights)[-1]) == [0, 1, 3, 4]

    def test_h2o_spares_the_first(self) -> None:
        weights = [[0.0, 0.4, 0.1, 0.2], [0.0] * 4]
        assert sorted(drive(H2O(4, init_grace_tokens=1), [4, 1], weights)[-1]) == [0, 1, 3, 4]

    def test_normalized_scores_do_not_favour_the_old(self) -> None:
        weights = [[0.9, 0.8, 0.7, 0.3], [0.0] * 4]
        # Seen by 4, 3, 2 and 1 queries: 0.225, 0.267, 0.35, 0.3.
        assert sorted(drive(H2O(4, normalize_scores=True), [4, 1], weights)[-1]) == [1, 2, 3, 4]
        assert sorted(drive(H2O(4), [4, 1], weights)[-1]) == [0, 1, 2, 4]

    def test_scores_add_up_and_move_with_their_tokens(self) -> None:
        weights = [[0.3, 0.2, 0.1, 0.5], [0.0, 0.9, 0.0, 0.2], [0.0] * 4]
        after = drive(H2O(4), [4, 1, 1], weights)
        # Token 2 goes, and 3 moves from the tail to its slot; then 4, with 0.2, is the least but for
        # 0, with 0.3: 1 has 1.1 and 3 has 0.5.
        assert after[1:] == [[0, 1, 3, 4], [0, 1, 3, 5]]

    def test_ties_evict_as_many_as_needed(self) -> None:
        after = drive(H2O(6), [6, 3], [[0.5] * 6, [0.0] * 6])
        assert len(set(after[-1])) == 6
        assert set(range(6, 9)) <= set(after[-1])

    def test_groups_and_sequences_decide_for_themselves(self) -> None:
        policy = H2O(2)
        policy.reset(2, 1, CPU)
        policy.observe(policy.place(2), torch.tensor([[[0.1, 0.2]], [[0.2, 0.1]]]))
        eviction = policy.place(1)
        assert isinstance(eviction, GroupedEviction)
        assert eviction.slots_BGm.tolist() == [[[0]], [[1]]]

    def test_reset_forgets(self) -> None:
        policy = H2O(3)
        weights = [[0.5, 0.4, 0.1], [0.0] * 3]
        assert drive(policy, [3, 1], weights) == drive(policy, [3, 1], weights)

    def test_nan_scores_displace_valid_slots_and_no_first_token(self) -> None:
        policy = H2O(5, init_grace_tokens=1)
        policy.reset(1, 1, CPU)
        policy.observe(policy.place(5), torch.full((1, 1, 5), math.nan))
        eviction = policy.place(3)
        assert isinstance(eviction, GroupedEviction)
        slots = eviction.slots_BGm.flatten().tolist()
        assert len(set(slots)) == 3
        assert set(slots) <= {1, 2, 3, 4}


class TestKinds:
    def test_what_the_host_knows_is_no_tensor(self) -> None:
        for policy in (Dense(4), LastRecent(4), H2O(4)):
            policy.reset(1, 1, CPU)
            assert isinstance(policy.place(3), SharedEviction)

    def test_the_log_keeps_small_integers(self) -> None:
        assert slot_dtype(2**15) == torch.int16
        assert slot_dtype(2**15 + 1) == torch.int32

    @pytest.mark.parametrize(
        ("name", "kind", "needs"),
        [("dense", Dense, False), ("lastrec", LastRecent, False), ("h2o", H2O, True)],
    )
    def test_make_policy(self, name: str, kind: type, needs: bool) -> None:
        policy = make_policy(CacheConfig.from_name(name, cache_length=(3, 4)), 1)
        assert isinstance(policy, kind)
        assert policy.needs_weights is needs
        policy.reset(1, 1, CPU)
        assert policy.place(4).cache_length == 4


class TestBadInput:
    def test_dense_refuses_a_sequence_longer_than_the_cache(self) -> None:
        policy = Dense(4)
        policy.place(3)
        with pytest.raises(ValueError, match=r"dense keeps every token.*at least 5.*4 slots.*lastrec"):
            policy.place(2)
        policy.place(1)

    @pytest.mark.parametrize("policy", [Dense(4), LastRecent(4), H2O(4)], ids=lambda p: type(p).__name__)
    def test_an_empty_chunk(self, policy: Policy) -> None:
        policy.reset(1, 1, CPU)
        with pytest.raises(ValueError, match="at least one token, got 0"):
            policy.place(0)

    @pytest.mark.parametrize(
        "policy", [LastRecent(4, init_grace_tokens=2), H2O(4, init_grace_tokens=1, grace_period=1)]
    )
    def test_a_chunk_for_which_grace_tokens_leave_no_room(self, policy: Policy) -> None:
        policy.reset(1, 1, CPU)
        policy.observe(policy.place(4), torch.ones(1, 1, 4))
        with pytest.raises(ValueError, match=r"chunk of 3 tokens.*2 hold grace tokens.*room for 2"):
            policy.place(3)
        assert policy.place(2).filled_before == 4

    def test_a_first_chunk_longer_than_the_cache(self) -> None:
        with pytest.raises(ValueError, match=r"chunk of 5 tokens does not fit"):
            LastRecent(4).place(5)

    def test_weights_of_another_length(self) -> None:
        policy = H2O(4)
        policy.reset(1, 1, CPU)
        eviction = policy.place(3)
        with pytest.raises(ValueError, match=r"weights for 4 slots, expected the 3"):
            policy.observe(eviction, torch.zeros(1, 1, 4))

    def test_weights_of_a_chunk_before_the_last(self) -> None:
        policy = H2O(4)
        policy.reset(1, 1, CPU)
        first = policy.place(2)
        policy.place(1)
        with pytest.raises(ValueError, match="right after its attention"):
            policy.observe(first, torch.zeros(1, 1, 2))

    def test_a_sequence_that_was_never_started(self) -> None:
        with pytest.raises(RuntimeError, match="call reset"):
            H2O(4).place(1)

    def test_an_eviction_with_the_wrong_number_of_slots(self) -> None:
        integers = {"filled_before": 4, "chunk_length": 2, "cache_length": 4}
        with pytest.raises(ValueError, match="1 slots, expected 2"):
            SharedEviction(**integers, runs=((0, 1),))
        with pytest.raises(ValueError, match=r"\[batch, groups, 2\], got \[1, 1, 3\]"):
            GroupedEviction(**integers, slots_BGm=torch.zeros(1, 1, 3, dtype=torch.int16))

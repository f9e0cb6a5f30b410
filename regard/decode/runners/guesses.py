"""Speculation in the slots of a graph: passes over each row's next token and guesses of those that follow.

A pass is a pack of prompts whose sizes are fixed, with logits at every place, so that a CUDA graph holds it: guesses
are looked up in the rows' texts, or made by steps of a draft model, on the device; the model reads them; each place
chooses as a step does; and a row moves on by the guesses that equal the choices, and one. What lies in pages behind
that is written over by the next pass. A round is several passes, of which the host reads what was said.

Whether a round guesses is decided before each: where a pass brings more tokens than plain steps do in its time. How
many lookup brings is known without trying: the host looks up what rows say in plain rounds, while these run. A draft
model is tried, the more rarely the less it brings.
"""

from __future__ import annotations

from collections import abc
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decode.runners.steps import Copies, GraphSteps
from regard.decode.sampling import PENALTIES, TOPS, best_n
from regard.decode.sequence import Slot
from regard.decode.speculate import LONGEST, Index, Rate
from regard.fast.cuda.prompts import Pack, Part, Sizes
from regard.fast.cuda.record import send
from regard.kernels.triton.sample import best

PASSES = 8  # of a round at most: the host reads a round before it asks for the next one
SKIPPED = -2  # in the log: a guess was wrong before this place
NO_GUESS = -3  # equals no token
AHEAD = 64  # guesses of a pass at most, as settings allow
FEW, FEW_EACH = 8, 16  # rows, and tokens of a row, that are read as rows of a step; not measured
READ = 4096  # tokens that the host indexes while a round runs; chosen so that it is not late
# Passes are to bring so much more than steps. Before it has measured: of how many steps' time a pass is, and what each
# of its tokens adds.
MARGIN, PASS, TOKEN = 1.1, 1.2, 1 / 200
# Rounds between two tries of a draft model that does not pay, at first and at most; and passes of a try.
LEAST, RAREST, TRIED = 8, 128, 2
PIECE, TOGETHER = 1024, 16  # tokens of a text that a draft model reads at once, and texts


class Plan(NamedTuple):
    """What a round guesses."""

    ahead: int  # tokens of a row
    drafts: bool  # by the draft model
    passes: int  # at most
    rate: float  # tokens that a pass is expected to bring


PLAIN = Plan(0, False, 0, 1.0)


class Guesses:
    """Memory of texts and logs of a runner's steps; what a pass costs, and what a draft model brings."""

    def __init__(self, steps: GraphSteps):
        self.steps = steps
        self.log, self.logp = (self._lines(x) for x in (steps.state.log, steps.state.logp))
        self.seconds: dict[Any, float] = {}  # of a step or a pass, the least that was measured
        self.last: torch.cuda.Event | None = None  # when the last round had arrived
        # What a step of the draft model is of one of the model's; and how many tokens its guesses bring.
        self.share = 0.0 if steps.draft is None else size_of(steps.draft.fast) / size_of(steps.fast)
        self.rate = Rate(1.0, 1.0)
        self.rest, self.wait = 0, LEAST  # plain rounds to come, and after the next try
        self.budget = READ
        self.awaited: dict[Any, Any] = {}  # passes whose graphs were put off

    @staticmethod
    def _lines(x: Tensor) -> Tensor:
        """A log like this one, of a round with guesses."""
        return x.new_zeros(1 + PASSES * (1 + AHEAD), *x.shape[1:])

    @cached_property
    def tops(self) -> list[Tensor]:
        return [self._lines(x) for x in self.steps.tops]

    @cached_property
    def texts(self) -> Tensor:
        """What rows have said, as far as it was looked up."""
        rows, size = self.steps.rows, self.steps.length + 1 + AHEAD
        return torch.zeros(rows, size, dtype=torch.int32, device=self.steps.device)

    # --- a pass, on the device ---

    def step(
        self, width: int, bound: int, far: int, used: frozenset[str], ahead: int, drafts: bool
    ) -> None:
        s = self.steps.state.narrow(width)
        found = self.drafted(width, bound, ahead) if drafts else self.looked_up(width, bound, ahead)
        ids = torch.cat([s.ids[:, None], found], 1)
        self.judge(self.logits(ids, bound, far), found, used, not drafts)

    def looked_up(self, width: int, bound: int, ahead: int) -> Tensor:
        """Guesses from the rows' own texts (w ahead)."""
        s = self.steps.state.narrow(width)
        self.texts[:width].scatter_(1, s.pos[:, None], s.ids[:, None].int())
        return look_up(self.texts[:width, :bound], s.pos[:, None], ahead)

    def drafted(self, width: int, bound: int, ahead: int) -> Tensor:
        """Greedy guesses of the draft model (w ahead), which reads all of them."""
        own, s = self.steps.draft, self.steps.state.narrow(width)
        assert own is not None
        mine, bound = own.state.narrow(width), min(bound, own.length)
        mine.ids.copy_(s.ids)
        mine.pos.copy_(s.pos.clamp(max=bound - 1))
        found = []
        for _ in range(ahead):
            found.append(best(own.logits(width, bound, 0))[0])
            mine.ids.copy_(found[-1])
            mine.pos.add_(1).clamp_(max=bound - 1)
        own.fed(width, bound, 0)
        return torch.stack(found, 1)

    def logits(self, ids: Tensor, bound: int, far: int) -> Tensor:
        """Of a token and guesses of each row (w s), which are read into its pages: (w s V)."""
        (width, s), steps = ids.shape, self.steps
        page, n, device = steps.pool.page, ids.numel(), ids.device
        start = steps.state.pos[:width]
        every, place = torch.arange(n, device=device), torch.arange(s, device=device)
        pos = (start[:, None] + place).clamp(max=bound - 1).flatten()
        row, none = every // s, every[:0]
        places = -(-bound // page)
        sizes = Sizes(n, width, s, bound, places, 0, far)
        # Guesses may be no tokens: of rows without numbers, or of a larger vocabulary.
        ids = ids.clamp(0, steps.vocab - 1).flatten()
        table, ends = (
            steps.pages.table[:width, :places].long(),
            torch.arange(width + 1, device=device),
        )
        totals = (start + s).clamp(max=bound)
        pack = Pack(
            sizes, ids, pos, row, every, every, every.view(width, s), table, start, totals, ends[:-1], ends * s, none,
            none, none, none
        )  # fmt: skip
        if width <= FEW and s <= FEW_EACH:
            pack.single = pos + 1, table.int()[row]
        hidden = steps.read_pack(pack, steps.kernels and n > 1)
        return steps.fast.logits(hidden).view(width, s, -1)

    def judge(self, logits: Tensor, guesses: Tensor, used: frozenset[str], notes: bool) -> None:
        """Choose at each place (w s V), and move the rows on by the guesses (w s-1) that equal the choices, and one."""
        steps, (width, size) = self.steps, logits.shape[:2]
        s, place = steps.state.narrow(width), torch.arange(size, device=logits.device)
        after = torch.cat([guesses, torch.full_like(guesses[:, :1], NO_GUESS)], 1)
        going, found = s.live, []
        # Where a choice depends on those before it, one place after the other.
        each = 1 if used & PENALTIES.keys() else size
        for first in range(0, size, each):
            span = slice(first, first + each)
            some = self.choose(logits[:, span], s.count[:, None] + place[span], used)
            right = (some[0] == after[:, span]).long().cumprod(1)
            said = going[:, None] * torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], 1)
            for j in range(each):
                steps.columns.said(slice(0, width), some[0][:, j], said[:, j])
            going = going * right[:, -1]
            found.append(some)
        tokens, logp, norm = (torch.cat(x, 1) for x in zip(*found, strict=True))
        right = (tokens == after).long().cumprod(1).sum(1, keepdim=True)
        lines = (s.tick[:, None] + place).clamp(max=len(self.log) - 1)
        kept = torch.where(place <= right, tokens, SKIPPED)
        self.log[:, :width].scatter_(0, lines.T, kept.T)
        self.logp[:, :width].scatter_(0, lines.T, logp.T)
        if TOPS in used:
            at = lines, torch.arange(width, device=logits.device)[:, None]
            for table, new in zip(
                self.tops, best_n(logits.flatten(0, 1), norm.flatten()), strict=True
            ):
                table[at] = new.view(width, size, -1)
        if notes:
            to = (s.pos[:, None] + 1 + place).clamp(max=self.texts.shape[1] - 1)
            self.texts[:width].scatter_(1, to, tokens.int())
        more = s.live * (right[:, 0] + 1)
        s.ids.copy_(tokens.gather(1, right)[:, 0])
        s.pos.add_(more).clamp_(max=s.last)
        s.count.add_(more)
        s.tick.add_(size)

    def choose(
        self, logits: Tensor, count: Tensor, used: frozenset[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens (w n) of some places (w n V) of rows that will have said `count` (w n) by then, -1 where there is
        none; their log probabilities, and the log sum exp."""
        shape, flat = count.shape, logits.flatten(0, 1)
        row = torch.arange(len(flat), device=flat.device) // shape[1]
        tokens, greatest, norm = self.steps.choose(flat, row, count.flatten(), used)
        tokens = torch.where(greatest < 0, -1, tokens)
        own = flat.gather(1, tokens.clamp(min=0)[:, None])[:, 0].float()
        logp = torch.where(tokens < 0, 0.0, own - norm)
        return tokens.view(shape), logp.view(shape), norm.view(shape)

    # --- a round ---

    def run(
        self,
        passes: int,
        width: int,
        bound: int,
        far: int,
        used: frozenset[str],
        ahead: int,
        drafts: bool,
    ) -> Copies:
        """As `GraphSteps.run`: passes, with a line of the logs for each place."""
        steps = self.steps
        logs = [self.log, self.logp, *(self.tops if TOPS in used else ())]
        steps.wait_for_copies()
        steps.open(logs)
        for _ in range(passes):
            steps.recorder.play(
                self.key(width, bound, far, used, ahead, drafts), self._step, steps.changed
            )
        return steps.send_logs(logs, 1 + passes * (1 + ahead))

    def _step(self, key: Any) -> None:
        self.step(*key[1:])

    def key(self, *sizes: Any) -> Any:
        return ("guess", *sizes)

    def ready(self, *sizes: Any) -> bool:
        """Whether nobody waits for a graph: where these are put off, it is wanted, and steps go on meanwhile."""
        recorder, key = self.steps.recorder, self.key(*sizes)
        if not (recorder.puts_off and recorder.records) or recorder.wider(key) in recorder.graphs:
            return True
        recorder.want(key, self._step, self.steps.changed)
        width, bound, _, _, *plan = sizes
        self.awaited[width, bound, *plan] = key
        return False

    # --- on the host: whether to guess ---

    def plan(self, live: abc.Sequence[Slot], width: int, bound: int) -> Plan:
        """What the next round of these rows may guess."""
        self.budget = READ
        if not live or any(slot.request.mask is not None for slot in live):
            return PLAIN
        draft = max(slot.settings.draft for slot in live) if self.steps.draft is not None else 0
        ahead = draft or max(slot.settings.lookup for slot in live)
        if not ahead:
            return PLAIN
        # Of a row that asks for none, no guess is right.
        asking = [s for s in live if (s.settings.draft if draft else s.settings.lookup)]
        more = sum((self.rate if draft else s.rate).each - 1 for s in asking)
        rate = 1 + more / len(live)
        sizes = width, bound, ahead, bool(draft)
        if self.awaited.get(sizes) in self.steps.recorder.wanted:
            return PLAIN
        if rate > MARGIN * self.cost(*sizes):
            self.wait = LEAST
            return Plan(ahead, bool(draft), PASSES, rate)
        # How good a draft model is now, and whether a pass was slow by chance, a try tells.
        if draft or rate > MARGIN * self.expected(*sizes):
            self.rest -= 1
            if self.rest < 0:
                self.rest, self.wait = self.wait, min(2 * self.wait, RAREST)
                return Plan(ahead, bool(draft), TRIED, rate)
        return PLAIN

    def cost(self, width: int, bound: int, ahead: int, drafts: bool) -> float:
        """Of how many steps' time a pass is, as measured."""
        step = self.seconds.get((width, bound))
        each = self.seconds.get((width, bound, ahead, drafts))
        if step is None or each is None:
            return self.expected(width, bound, ahead, drafts)
        return each / step

    def expected(self, width: int, bound: int, ahead: int, drafts: bool) -> float:
        """The same before it is measured."""
        return PASS + (1 + ahead) * (width * TOKEN + self.share * drafts)

    def measure(self, key: Any, steps: int, arrival: torch.cuda.Event | None) -> None:
        """Of a round of so many steps or passes that has arrived: the time since the one before it."""
        before, self.last = self.last, arrival
        if before is not None and arrival is not None and key is not None and steps > 1:
            seconds = before.elapsed_time(arrival) / steps
            self.seconds[key] = min(seconds, self.seconds.get(key, seconds))

    def landed(
        self, slots: abc.Sequence[Slot], said: abc.Sequence[int], plan: Plan, passes: int
    ) -> None:
        """How many tokens a round of passes has brought each row."""
        for slot, n in zip(slots, said, strict=True):
            if plan.drafts:
                slot.drafted += n
            else:
                slot.noted += n
                slot.rate.note(n, passes)
        if plan.drafts and (
            own := [n for slot, n in zip(slots, said, strict=True) if slot.settings.draft]
        ):
            self.rate.note(sum(own) / len(own), passes)

    def watch(self, slot: Slot) -> None:
        """What a plain round has brought: how many passes it would have been with what was to be found in the text.
        The prompt is indexed before, some of it in every round."""
        row, wish = slot.sequence, slot.settings.lookup
        if row.index is None:
            row.index = Index([])
        have, ids = len(row.index.text), row.request.ids
        if have < len(ids):
            new = ids[have : have + self.budget]
            row.index.extend(new)
            self.budget -= len(new)
        have -= len(ids)
        new, passes = row.ids[have : have + self.budget] if have >= 0 else [], 0
        for token in new:
            row.index.extend([token])
            if row.guess and row.guess[0] == token:
                row.guess = row.guess[1:]
            else:
                row.guess, passes = row.index.after(wish), passes + 1
        self.budget -= len(new)
        slot.rate.note(len(new), passes)

    # --- what the device is to know before a round ---

    def prepare(self, live: abc.Sequence[Slot], drafts: bool) -> None:
        """Have the texts of rows looked up, or read by the draft model, up to what they have said."""
        if drafts:
            self._read([slot for slot in live if slot.settings.draft])
        else:
            self._note([slot for slot in live if slot.settings.lookup])

    def _note(self, slots: abc.Sequence[Slot]) -> None:
        rows, places, tokens = list[int](), list[int](), list[int]()
        for slot in slots:
            new = after(slot, slot.noted)
            rows += [slot.index] * len(new)
            places += range(slot.noted, slot.noted + len(new))
            tokens += new
            slot.noted += len(new)
        if tokens:
            row, place, token = send([rows, places, tokens], self.steps.device)
            self.texts[row, place] = token.int()

    def _read(self, slots: abc.Sequence[Slot]) -> None:
        own = self.steps.draft
        assert own is not None
        parts = []
        for slot in slots:
            end = len(slot.text) + slot.scheduled - 1
            new = after(slot, slot.drafted)[: end - slot.drafted]
            parts.append(Part(new, slot.drafted, slot.pages, home=slot.index))
            slot.drafted = end
        for first in range(0, max((len(p.tokens) for p in parts), default=0), PIECE):
            some = [
                replace(p, tokens=p.tokens[first : first + PIECE], start=p.start + first)
                for p in parts
                if len(p.tokens) > first
            ]
            for i in range(0, len(some), TOGETHER):
                own.prefill(some[i : i + TOGETHER], frozenset())


def look_up(texts: Tensor, pos: Tensor, ahead: int) -> Tensor:
    """What followed the end of each text (w n), at `pos` (w 1), where it was last: `Index.after` of all (w ahead).
    Where a text ends before so many, as if it went on in a circle; where nothing is found, whatever lies there."""
    bound, every = texts.shape[1], torch.arange(texts.shape[1], device=texts.device)
    same, score = torch.ones_like(texts, dtype=torch.bool), torch.zeros_like(texts)
    for n in range(LONGEST):
        mine = texts.gather(1, (pos - n).clamp(min=0))
        same = same & (texts.roll(n, 1) == mine) & (every >= n)
        score = score + same
    # The longest run, of these the last.
    score = torch.where((every < pos) & (score > 0), score.long() * bound + every, 0)
    end = score.argmax(1, keepdim=True)
    around = torch.arange(ahead, device=end.device) % (pos - end).clamp(min=1)
    return texts.gather(1, (end + 1 + around).clamp(max=bound - 1)).long()


def after(slot: Slot, place: int) -> list[int]:
    """The text of a row from a place on, as far as the host knows it."""
    ids = slot.request.ids
    return ids[place:] + slot.sequence.ids[max(0, place - len(ids)) :]


def size_of(model: Any) -> int:
    """Parameters that a step reads, about."""
    return sum(p.numel() for p in model.parameters())

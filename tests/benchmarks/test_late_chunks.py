"""The benchmark of late chunks: passages leave their documents, larger chunks are means, every way reads."""

from __future__ import annotations

import pytest
import torch

from benchmarks import late_chunks
from tests.integrations.test_late_chunks import bert, letters, numbers, own

WORDS = " ".join(f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx")  # 1,536 tokens


def test_passages_leave_their_document() -> None:
    held = late_chunks.held_out(WORDS, letters(), torch.Generator().manual_seed(0))
    assert len(held.passages) == 3
    rest = held.document
    for passage in held.passages:
        assert len(numbers(passage)) == 100
        assert passage in WORDS
        assert passage not in rest
    assert len(numbers(rest)) == 1536 - 300
    first, second, third = map(WORDS.index, held.passages)
    assert first < len(WORDS) // 3 <= second < 2 * len(WORDS) // 3 <= third


def test_a_chunk_twice_as_large_is_the_mean_of_its_tokens() -> None:
    tokens = torch.randn(7, 5)
    means = torch.stack([each.mean(0) for each in tokens.split(2)])
    assert torch.allclose(late_chunks.merged(means, [2, 2, 2, 1]), torch.stack([x.mean(0) for x in tokens.split(4)]))


def test_ranks_are_counted_by_the_nearest_vector_and_compared_passage_by_passage() -> None:
    axes, owners = torch.eye(3), torch.tensor([0, 0, 1, 2])
    passages = torch.stack([axes[0], axes[1], axes[1], axes[0] + 2 * axes[2]])
    documents = [axes[i : i + 1] for i in range(3)]
    late = late_chunks.ranks(passages, documents, owners)
    assert late.tolist() == [1, 3, 1, 1], "a tie with a document that is no nearer counts against"
    several = [torch.stack([axes[0], 5 * axes[1]]), axes[2:], axes[2:]]
    alone = late_chunks.ranks(passages, several, owners)
    assert alone.tolist() == [1, 1, 3, 2]
    key, other = (late_chunks.LATE, 6, late_chunks.MEAN), (late_chunks.ALONE, 6, late_chunks.MEAN)
    made = late_chunks.row(key, {key: late, other: alone}, 1.5)
    assert (made["recall_at_1"], made["gained"], made["lost"], made["seconds"]) == (0.75, 2, 1, 1.5)
    assert made["mrr"] == pytest.approx((3 + 1 / 3) / 4)
    assert "gained" not in late_chunks.row(other, {key: late, other: alone}, 1.5)


def test_every_way_reads_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_chunks, "SMALL", 6)
    monkeypatch.setattr(late_chunks, "LARGE", 12)
    monkeypatch.setattr(late_chunks, "READS", 24)
    model, steps = bert(), list[str]()
    reader = late_chunks.Reader(model, letters())
    held = [
        late_chunks.Held(" ".join(x * 5 for x in part), [part[1] * 5, part[4] * 5, part[7] * 5])
        for part in ("abcdefgh", "ijklmnop", "qrstuvwx")
    ]
    rows = late_chunks.measure(reader, held, steps.append)
    assert len(steps) == 3
    assert [(row["way"], row["chunk"], row["use"]) for row in rows] == [
        *((way, size, use) for way in (late_chunks.LATE, late_chunks.ALONE) for size in (6, 12)
          for use in (late_chunks.NEAREST, late_chunks.MEAN)),
        (late_chunks.CUT, 24, late_chunks.ONE),
    ]  # fmt: skip
    assert all(0 <= row["recall_at_1"] <= row["mrr"] <= 1 and row["seconds"] > 0 for row in rows)
    ids = numbers(held[0].document)
    (vectors,) = reader.alone(held[0].document, 12).values()
    assert len(vectors) == len(reader.late(held[0].document)[12]) == 4
    with torch.no_grad():
        assert torch.allclose(
            vectors[1], model(torch.tensor([[2, *ids[12:24], 3]])).last_hidden_state.mean(1)[0], atol=1e-5
        )
    assert torch.allclose(reader.late(held[0].document)[6][0], own(model, ids[:22])[:6].mean(0), atol=1e-5)

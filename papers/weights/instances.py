"""The chains behind table 1 of the weights paper, as far as they can be told from what is printed.

The paper gives, for each row, the depth, the batch size and the durations of four schedules, and says of sizes: hidden
size 3072, 24 heads, about 20 MB of activations a layer at batch size 16, 1 to 2 GB of intermediate activations that are
recomputed in each backward, a V100 with 16 GB, 12 GB/s. It gives neither memory limits nor times by layer. Assumed:

1. A depth of L is L - 2 equal blocks between an embedding and a loss. Embedding and loss take no time; the loss has no
   weights.
2. "12 GB/s" is 12000 MiB/s. A block of 12 x 3072² parameters in fp32 is 432 MiB and takes 36 ms, the embedding of
   51200 + 1024 rows 612 MiB; then sum of u + 2 sum of w / bandwidth is the printed L2L of GPT-2 to the millisecond.
3. For Bert the printed L2L implies blocks of 160.1 MiB and 623.8 MiB for the embedding (two unknowns, six rows that
   agree to 1 ms). That is not a hidden size of 3072, whatever the text says; activations are scaled by 2/3 for it.
4. A block's time is the row's sum of u by the number of blocks: a quarter of it forward, three quarters backward (the
   backward recomputes the forward and takes twice as long itself).
5. Activations kept: 20 MB a block at batch size 16, in proportion to the batch. The intermediate ones, 2 GB at batch
   size 16 in proportion, are taken off the 16 GiB: what is left is the memory limit ("smaller than 16GB and depends on
   the batch size").
6. Updates are plain: no optimizer state, gradients as large as the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import Chain, Stage

MiB = 2**20
GIGABYTE_A_SECOND = 1000 * MiB  # assumption 2


@dataclass(frozen=True, slots=True)
class Row:
    """One row of table 1, durations in milliseconds."""

    network: str
    depth: int
    batch: int
    compute: int
    bound: int
    greedy: int
    l2l: int
    nodiscount: int

    @property
    def name(self) -> str:
        """The row in words."""
        return f"{self.network} {self.depth} b{self.batch}"

    @property
    def _scale(self) -> float:
        """How much there is of activations, against GPT-2 at batch size 16."""
        return self.batch / 16 * (1.0 if self.network == "GPT-2" else 2 / 3)

    @property
    def memory_budget(self) -> int:
        """The limit of assumption 5, in bytes."""
        return int(16 * 2**30 - 2e9 * self._scale)

    def chain(self) -> Chain:
        """The row's network."""
        block_mib, embedding_mib = (432.0, 612.0) if self.network == "GPT-2" else (160.1, 623.8)
        kept, seconds = int(20e6 * self._scale), self.compute / 1e3 / (self.depth - 2)
        sizes = {"output_bytes": kept, "saved_bytes": kept}
        block = {**sizes, "weight_bytes": int(block_mib * MiB)}
        stages = [
            Stage("embedding", 0.0, 0.0, weight_bytes=int(embedding_mib * MiB), **sizes),
            *(Stage(f"block {k}", seconds / 4, seconds * 3 / 4, **block) for k in range(1, self.depth - 1)),
            Stage("loss", 0.0, 0.0, output_bytes=0, saved_bytes=0),
        ]
        return Chain(self.name, stages)


TABLE_1 = (
    Row("GPT-2", 74, 64, 47421, 47421, 47493, 52707, 47493),
    Row("GPT-2", 56, 64, 35553, 35553, 35625, 39542, 35625),
    Row("GPT-2", 38, 64, 23694, 23694, 23838, 26387, 23838),
    Row("GPT-2", 74, 32, 23697, 23697, 23769, 28983, 23769),
    Row("GPT-2", 56, 32, 17762, 17762, 17834, 21751, 17834),
    Row("GPT-2", 38, 32, 11840, 11840, 11948, 14533, 11948),
    Row("GPT-2", 74, 16, 11612, 11612, 11684, 16898, 11715),
    Row("GPT-2", 56, 16, 8697, 8697, 8769, 12686, 8800),
    Row("GPT-2", 38, 16, 5794, 5794, 5902, 8487, 5934),
    Row("Bert", 144, 64, 34486, 34486, 34499, 38379, 34499),
    Row("Bert", 96, 64, 22965, 22965, 22978, 25577, 22978),
    Row("Bert", 144, 32, 17443, 17443, 17483, 21336, 17483),
    Row("Bert", 96, 32, 11617, 11617, 11657, 14230, 11657),
    Row("Bert", 144, 16, 9090, 9090, 9183, 12983, 9215),
    Row("Bert", 96, 16, 6058, 6058, 6085, 8670, 6085),
)

# Figure 4 varies the bandwidth for rows of table 1 with batch sizes 32 and 64; which depths is not said.
FIGURE_4 = (TABLE_1[0], TABLE_1[3])
BANDWIDTHS = (0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 12.0)  # 3 is not in the figure; it shows where the discount counts

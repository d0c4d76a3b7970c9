"""Columns of every Parquet artifact: name, type, meaning. The one place that documents them.

Every table can be joined with every other on the columns they share, without parsing a file's name.
"""

from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True)
class Column:
    """One column: its name, Arrow type, meaning, and whether it may hold nulls."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False


@dataclass(frozen=True)
class Schema:
    """The columns of one kind of Parquet artifact, in order."""

    columns: tuple[Column, ...]

    @property
    def names(self) -> list[str]:
        """Column names in order."""
        return [column.name for column in self.columns]

    def arrow(self) -> pa.Schema:
        """The Arrow schema that the file must have."""
        return pa.schema([pa.field(c.name, c.type, c.nullable) for c in self.columns])


MODEL = Column("model", pa.string(), "the model's name in params.yaml")
CRITERION = Column("criterion", pa.string(), "selection criterion; `none` for the dense row")
N = Column("n", pa.int64(), "number of removed decoder layers; 0 for the dense row")
OPERATOR = Column("operator", pa.string(), "recovery operator; `none` for the dense row")
ROW = (MODEL, CRITERION, N, OPERATOR)

DTYPE = Column("dtype", pa.string(), "dtype of the weights and of the forward pass")
CALIBRATION = Column(
    "calibration",
    pa.string(),
    "calibration text: <corpus>:<sequences>x<seqlen>:seed<seed>:<first 8 hex digits of the SHA-256 of the token ids>; "
    "null for the dense row, which needs none",
    nullable=True,
)
BOUNDARY = Column(
    "boundary",
    pa.string(),
    "`run`: one operator per removed run; `layer`: a product of one per removed layer; null for the dense row",
    nullable=True,
)
OPTIONS = Column("options", pa.string(), "the operator's options as JSON; null for the dense row", nullable=True)
OPERATOR_DTYPE = Column(
    "operator_dtype",
    pa.string(),
    "dtype that the boundary operators are kept and applied in: `model`, the one in `dtype`; `float32`; null for the "
    "dense row and for rows without operators",
    nullable=True,
)
EVALUATED = (*ROW, DTYPE, CALIBRATION, BOUNDARY, OPTIONS, OPERATOR_DTYPE)

SEQLEN = Column("seqlen", pa.int64(), "tokens in one sequence or window")
CORPUS = Column("corpus", pa.string(), "the corpus' name in params.yaml")
SOURCE = Column("source", pa.string(), "where text or questions come from: file or data set, config, split, part")
BOS = Column("bos", pa.string(), "`once`: special tokens at the start of the stream; `every-window`: in each window")
SEQUENCE = Column("sequence", pa.int64(), "number of the sequence, from 0")
INPUT_IDS = Column("input_ids", pa.list_(pa.int32()), "token ids of the sequence")
START = Column("start", pa.int64(), "index of the residual state h_start, the input of layer `start`")
END = Column("end", pa.int64(), "index of the residual state h_end; the layers start..end-1 lie between the two")
TOKENS = Column("tokens", pa.int64(), "number of tokens that the mean or the sum is over")

PARAMETERS = Column("parameters", pa.int64(), "parameters of the model, operators included, tied ones once")
OPERATOR_PARAMETERS = Column("operator_parameters", pa.int64(), "parameters of its boundary operators alone")

GRID = Schema((*ROW, Column("key", pa.string(), "the row's key in file names")))

SEED = Column("seed", pa.int64(), "seed of the choice of windows; null: the first in order", nullable=True)
CUT = Column("cut", pa.string(), "what was cut into windows: the `stream` of joined documents, or each of `documents`")
DOCUMENT = Column(
    "document", pa.int64(), "number of the window's document in the source, from 0; null in a stream", nullable=True
)
OFFSET = Column("offset", pa.int64(), "tokens of the document or stream before the window's")

WINDOWS = (MODEL, CORPUS, SOURCE, BOS, CUT, SEQLEN, SEED)

CALIBRATION_TEXT = Schema((*WINDOWS, CALIBRATION, SEQUENCE, DOCUMENT, OFFSET, INPUT_IDS))

CORPUS_TEXT = Schema((*WINDOWS, SEQUENCE, DOCUMENT, OFFSET, INPUT_IDS))

SCORE = Schema(
    (
        MODEL,
        DTYPE,
        CALIBRATION,
        SEQLEN,
        CORPUS,
        SOURCE,
        BOS,
        CUT,
        SEED,
        Column("sequences", pa.int64(), "number of calibration sequences"),
        START,
        END,
        Column("cosine", pa.float64(), "mean over tokens of cos(h_start, h_end)"),
        Column("angular", pa.float64(), "mean over tokens of arccos(cos(h_start, h_end)) / pi, in [0, 1]"),
        Column("angular_last", pa.float64(), "the same over the last token of each sequence alone"),
        TOKENS,
    )
)

SELECT = Schema(
    (
        MODEL,
        CRITERION,
        N,
        DTYPE,
        CALIBRATION,
        Column("layer", pa.int64(), "index of a removed decoder layer, from 0"),
        Column("layers", pa.int64(), "number of decoder layers of the dense model"),
        Column("criterion_options", pa.string(), "the criterion's options as JSON"),
    )
)

SOLVE = Schema(
    (
        *ROW,
        DTYPE,
        CALIBRATION,
        START,
        END,
        TOKENS,
        BOUNDARY,
        Column("residual_before", pa.float64(), "||X_pre - X_post||^2 / ||X_post||^2 (Frobenius), no operator"),
        Column(
            "residual_after",
            pa.float64(),
            "||X W + b - X_post||^2 / ||X_post||^2 (Frobenius), with operator W and bias b; X is X_pre, after the new "
            "down projection of a row that has one",
        ),
        Column(
            "token_residual_before",
            pa.float64(),
            "mean over tokens of ||x_pre - x_post||^2 / ||x_post||^2, no operator",
        ),
        Column(
            "token_residual_after",
            pa.float64(),
            "mean over tokens of ||x_pre W + b - x_post||^2 / ||x_post||^2, with operator W and bias b; null where the "
            "row has a new down projection, which the sums do not tell it for",
            nullable=True,
        ),
        Column(
            "antisymmetric_share",
            pa.float64(),
            "||M - M^T||_F / (2 ||M||_F) of M = W - I; null where M = 0",
            nullable=True,
        ),
        Column("condition", pa.float64(), "condition number of the Gram matrix X_pre^T X_pre; infinite if singular"),
        OPTIONS,
        Column("chosen", pa.string(), "options that the operator chose itself, as JSON"),
    )
)

EVAL_PPL = Schema(
    (
        *EVALUATED,
        CORPUS,
        SOURCE,
        BOS,
        CUT,
        SEQLEN,
        SEED,
        Column("window", pa.int64(), "number of the window, from 0"),
        Column("tokens", pa.int64(), "number of predicted tokens in the window"),
        Column("nll", pa.float64(), "sum of the predicted tokens' negative log-likelihoods, nats"),
        PARAMETERS,
        OPERATOR_PARAMETERS,
    )
)

NEW_TOKENS = Column("new_tokens", pa.int64(), "tokens generated after the prompt, at most where a text may end before")

GENERATE = Schema(
    (
        *ROW,
        DTYPE,
        Column("prompt", pa.string(), "the text that the model goes on from"),
        Column("continuation", pa.string(), "what it writes, greedily: always the likeliest token"),
        NEW_TOKENS,
    )
)

COST = Schema(
    (
        *ROW,
        DTYPE,
        Column("device", pa.string(), "type and name of the device"),
        Column("threads", pa.int64(), "threads of the host's processor that torch uses"),
        Column("batch_size", pa.int64(), "sequences processed together"),
        Column("prompt_tokens", pa.int64(), "tokens of each prompt"),
        NEW_TOKENS,
        Column("repeat", pa.int64(), "number of the measurement, from 0; those of the compared models take turns"),
        Column("prefill_seconds", pa.float64(), "one forward pass over the prompts that fills the cache"),
        Column("decode_seconds", pa.float64(), "the forward passes of all new tokens, one after the other"),
        PARAMETERS,
        OPERATOR_PARAMETERS,
        Column("weight_bytes", pa.int64(), "bytes of parameters and buffers, tied ones once"),
        Column(
            "peak_bytes",
            pa.int64(),
            "weight_bytes and the most bytes of other tensors alive at once in a prefill and its decoding",
        ),
        Column(
            "prefill_flops",
            pa.int64(),
            "floating-point operations of a prefill's matrix products, as if no mask",
        ),
        Column("operator_flops", pa.int64(), "those of its boundary operators alone"),
    )
)

EVAL_ACC = Schema(
    (
        *EVALUATED,
        Column("task", pa.string(), "lm-evaluation-harness task or group of tasks"),
        Column("member", pa.string(), "the task that the question is of: the task itself, or a member of the group"),
        Column("version", pa.string(), "the version of the task or group"),
        SOURCE,
        Column("limit", pa.int64(), "most questions of each member that were asked; null if all", nullable=True),
        Column("available", pa.int64(), "questions in the evaluated splits of all members"),
        Column("num_fewshot", pa.int64(), "solved examples before each question"),
        Column("batch_size", pa.int64(), "requests forwarded together"),
        Column("question", pa.int64(), "number of the question in the member's split, from 0"),
        Column("answer", pa.int64(), "index of the right choice"),
        Column("loglikelihoods", pa.list_(pa.float64()), "log-likelihood of every choice, nats, in the task's order"),
        Column("correct", pa.bool_(), "whether the most likely choice is the right one (the metric acc)"),
        Column(
            "correct_norm",
            pa.bool_(),
            "the same with log-likelihoods divided by the choices' length (acc_norm); null where the task has none",
            nullable=True,
        ),
    )
)

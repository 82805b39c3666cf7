"""The section that says which data there are, how they are dealt out, and how batches are drawn."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator
from pydantic.types import Discriminator

from flower_privdec import catalogue
from flower_privdec.catalogue import FEATURES
from flower_privdec.common.user_code import is_given
from flower_privdec.scenario.fields import (
    Count,
    OwnSection,
    PathText,
    Positive,
    Section,
)

PEER = "{peer}"  # in data.root, for a peer's number


class PartitionSection(Section):
    """How the training examples are dealt out to the peers.

    Attributes:
        kind: `iid` is equal random shares; `dirichlet` divides every class by a Dirichlet draw; `shards` sorts by
            label, cuts, and deals out; `pathological` gives each peer a few classes; `sizes` is random shares of
            given sizes.
        alpha: of the Dirichlet distribution, small is skewed; for kind dirichlet alone.
        min_size: the least examples a peer holds, for kind dirichlet alone: one that drew fewer is given random
            examples of the peers that hold most; left out, what is drawn stays, and a peer without any is refused.
        shards_per_peer: for kind shards alone.
        classes_per_peer: for kind pathological alone.
        sizes: one count, or one share of the whole, for each peer; for kind sizes alone.
    """

    kind: Annotated[str, catalogue.PARTITIONS] = "iid"
    alpha: Positive | None = None
    min_size: Count | None = None
    shards_per_peer: Count | None = None
    classes_per_peer: Count | None = None
    sizes: list[Positive] | None = None

    @model_validator(mode="after")
    def _needs_its_option(self) -> PartitionSection:
        needed = {
            "dirichlet": "alpha",
            "shards": "shards_per_peer",
            "pathological": "classes_per_peer",
            "sizes": "sizes",
        }
        for kind, option in needed.items():
            is_set = getattr(self, option) is not None
            if is_set and kind != self.kind:
                raise ValueError(f"{option} belongs to kind {kind}, not to {self.kind}: remove it")
            if not is_set and kind == self.kind:
                raise ValueError(f"kind {kind} needs {option}: add it")
        if self.min_size is not None and self.kind != "dirichlet":
            raise ValueError(f"min_size belongs to kind dirichlet, not to {self.kind}: remove it")
        return self


class BatchSection(Section):
    """How a peer draws its examples for a step.

    Attributes:
        sampling: `poisson` draws each example by itself, with probability rate, or size / count, as the accountant's
            amplification needs it; `uniform` exactly size distinct ones; `shuffle` runs through each epoch's
            permutation; `full` takes all; `blocks` is one of count // size fixed batches.
        size: examples in a batch, on average for poisson; every sampling but full needs it, or a rate.
        rate: in place of size, of poisson alone: the probability of every example to be drawn, the same at every peer.
            A peer of J examples then draws rate J on average, by which its sums are divided; privacy is amplified
            alike at all peers, and a peer with few examples has the more noise in its mean.
        small_peers: what becomes of a peer that holds fewer examples than size: it is refused; or full, it takes all
            it holds in every step. Nothing is then amplified for it, so that it needs more noise for the same ε.
    """

    sampling: Annotated[str, catalogue.SAMPLINGS] = "poisson"
    size: Count | None = None
    rate: Annotated[float, Field(ge=1e-9, le=1, allow_inf_nan=False)] | None = None
    small_peers: Literal["refused", "full"] = "refused"

    @model_validator(mode="after")
    def _size_or_rate(self) -> BatchSection:
        if self.rate is not None and self.sampling != "poisson":
            raise ValueError(
                f"rate belongs to sampling poisson, not to {self.sampling}: "
                + ("remove it" if self.sampling == "full" else "give size, or use poisson")
            )
        if self.sampling == "full" and self.size is not None:
            raise ValueError("sampling full takes every local example: remove size")
        if self.size is not None and self.rate is not None:
            raise ValueError("size and rate are two ways to say how much is drawn: give one")
        if self.sampling != "full" and self.size is None and self.rate is None:
            either = "size (examples a step) or rate" if self.sampling == "poisson" else "size (examples a step)"
            raise ValueError(f"sampling {self.sampling} needs {either}: add it")
        if self.small_peers == "full" and self.size is None:
            raise ValueError("small_peers is for peers that hold fewer than size, and there is no size: remove it")
        return self


def _public(value: Any) -> Any:
    """Refuse a validation set of examples that are not the public test set's."""
    if isinstance(value, str | dict | list):
        raise ValueError(
            "must be how many examples of the public test set to take: what is weighed by private examples would tell "
            "of them, and no ε here covers it"
        )
    return value


def _dataset_tag(value: Any) -> str:
    return "named" if isinstance(value, str) else "own"


DatasetChoice = Annotated[
    Annotated[str, catalogue.DATASETS, Tag("named")] | Annotated[OwnSection, Tag("own")],
    Discriminator(_dataset_tag),
]


class DataSection(Section):
    """Which data, how much of it, and how it is dealt and drawn.

    Attributes:
        dataset: `digits` and `breast-cancer` are embedded; `npz` is a file of your own with the arrays x_train,
            y_train, x_test and y_test. A function of your own is called with "train" or "test", its arguments, and root
            where that is given; it returns x and y.
        root: the folder in which the data lie, or the .npz file, from where the command runs; nothing is downloaded.
            With `{peer}` in it, for the peer's number, each peer has a file of its own and nothing is dealt out.
        test: where the public test set lies, in place of root; needed where root has `{peer}`, and for svmlight.
        source: of data that are given in Python, the name under which a ledger counts them.
        n_features: of svmlight, which needs it: how many features there are; indices are 1 to n_features.
        classes: how many there are; left out, they are counted.
        vocabulary: how many tokens there are, where examples of your own are whole numbers 0..vocabulary-1; left out,
            they are real numbers.
        samples: how many training examples to take, at random; left out, all.
        test_samples: how many of the public test set to take; left out, all.
        validation: how many more of the public test set to keep out of every test figure, for an algorithm that weighs
            what it hears by them, as pdsl does and must; with others they are only kept out, so that all are tried on
            the same examples. Left out, none.
        partition: how the training examples are dealt out.
        batch: how a peer draws its examples.
    """

    dataset: DatasetChoice
    root: PathText | None = None
    test: PathText | None = None
    source: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    n_features: Count | None = None
    classes: Annotated[int, Field(ge=2)] | None = None
    vocabulary: Annotated[int, Field(ge=2)] | None = None
    samples: Count | None = None
    test_samples: Count | None = None
    validation: Annotated[Count | None, BeforeValidator(lambda value: _public(value))] = None
    partition: PartitionSection = PartitionSection()
    batch: BatchSection

    @property
    def each_its_own(self) -> bool:
        """Whether each peer has a file of its own, so that nothing is dealt out."""
        return self.root is not None and PEER in self.root

    @model_validator(mode="after")
    def _source_of_what_is_given(self) -> DataSection:
        is_object = not isinstance(self.dataset, str) and is_given(self.dataset.module)
        if self.source is not None and not is_object:
            raise ValueError("source is for data that are given in Python, and these have a name: remove it")
        return self

    @model_validator(mode="after")
    def _svmlight_says_what_it_lacks(self) -> DataSection:
        if (self.dataset == "svmlight") != (self.n_features is not None):
            raise ValueError("n_features is of dataset svmlight, which needs it, and of no other")
        if self.dataset == "svmlight" and self.test is None:
            raise ValueError("test is missing: dataset svmlight needs the file of the public test set beside root")
        return self

    @model_validator(mode="after")
    def _own_files(self) -> DataSection:
        if not self.each_its_own:
            return self
        if self.test is None:
            raise ValueError(f"test is missing: where root has {PEER}, name the test set that all peers share")
        for key in ("samples", "partition"):
            if key in self.model_fields_set and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is for one dataset that is dealt out, and root has {PEER}: remove one of them")
        return self


class FeaturesSection(Section):
    """What each example is turned into, by itself and with nothing fitted on private data.

    Attributes:
        kind: a wavelet scattering transform (extra `features`).
        scales: J, wavelets of 1, 2, ... 2^(J-1) pixels; the output is 2^J times smaller.
        angles: L, how many directions.
        order: how many wavelets in a row, 1 or 2.
        groups: of channels, each normalised over one example; 0 for none.
        pool: the side to which each channel is averaged.
        whitening: by mean and covariance of the features of drawn pen strokes, or none.
        ridge: what whitening adds to the variances, as a share of the largest.
        norm: of the features of every example.
    """

    kind: Annotated[str, FEATURES]
    scales: Annotated[int, Field(ge=1, le=8)] = 2
    angles: Annotated[int, Field(ge=1, le=32)] = 8
    order: Annotated[int, Field(ge=1, le=2)] = 2
    groups: Annotated[int, Field(ge=0)] = 27
    pool: Count = 4
    whitening: Literal["none", "strokes"] = "none"
    ridge: Positive = 0.01
    norm: Positive = 4.0

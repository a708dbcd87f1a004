"""Reduction of the gradients of one training step: what travels together, under which names, and what is left alone.

``tape`` and the optimizers' adapters call a ``GradientReduction`` with a step's gradients and get them back reduced.
In a graph each gradient is an operation of its own, so that it travels while backpropagation goes on; eager operations
run one after the other, so there all of them are one group. A gradient that no rank has stays None, and nothing is sent
for it; ``presence`` agrees on that. A rank outside of the process set gets its own gradients back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from ringtrain._binding import tables
from ringtrain._runtime.operations import Adasum, Average
from ringtrain._runtime.process_sets import ProcessSet, global_process_set, is_alone
from ringtrain._training.grouping import Groups, grouped
from ringtrain._training.mode import SYNCHRONOUS, Mode, OneStepLate
from ringtrain._training.needs import check_needs
from ringtrain._training.on_host import HostSettings
from ringtrain._training.optimizer_arguments import check_compressor, check_scaling
from ringtrain._training.powersgd import PowerSGD
from ringtrain.elastic import TransparentState
from ringtrain.elastic.followed import followed
from ringtrain.errors import InvalidArgumentError, UnsupportedError
from ringtrain.tensorflow import names as naming
from ringtrain.tensorflow import on_host, presence, surviving
from ringtrain.tensorflow.compression import Compression, Compressor
from ringtrain.tensorflow.graph_world import divided_by_size
from ringtrain.tensorflow.kept import number_of
from ringtrain.tensorflow.nodes import as_it_is
from ringtrain.tensorflow.operations import allreduce, grouped_allreduce
from ringtrain.tensorflow.types import Gradient, Source


@dataclass(frozen=True)
class GradientReduction:
    """How gradients are reduced.

    Attributes:
        owner: who speaks in errors.
        op: ``Average`` or ``Sum``.
        compression: how gradients travel.
        sparse_as_dense: whether ``tf.IndexedSlices`` are made dense first.
        predivide: part of the average's divisor that is applied before the sum, against overflow.
        groups: as ``given_groups`` returns them; None as the head says.
        process_set: the ranks that take part.
        takes_adasum: whether ``op`` may be ``Adasum``, too.
        mode: ``Synchronous()``, or ``OneStepLate()`` for gradients of the step before.

    Raises:
        InvalidArgumentError: a value outside of these.
    """

    owner: str
    op: int = Average
    compression: type[Compressor] | PowerSGD = Compression.none
    sparse_as_dense: bool = False
    predivide: float = 1.0
    groups: Groups = None
    process_set: ProcessSet = global_process_set
    takes_adasum: bool = False
    mode: Mode = SYNCHRONOUS

    def __post_init__(self) -> None:
        check_scaling(self.owner, self.op, self.predivide, {"Adasum": Adasum} if self.takes_adasum else {})
        powersgd = self.compression if isinstance(self.compression, PowerSGD) else None
        if powersgd is None:
            check_compressor(self.compression)
        own = (
            powersgd is None and getattr(self.compression, "wire", None) is None and self.compression is not Compressor
        )
        given = {
            "adasum": self.op == Adasum,
            "groups": self.groups is not None,
            "groups on the host": self.groups is not None,
            "powersgd": powersgd is not None,
            "own compression": own,
        }
        adasum = ["op=Adasum"] if self.op == Adasum else []
        check_needs([*self.mode.columns, *adasum, *self._powersgd_column], given, self.owner)

    @property
    def late(self) -> bool:
        """Whether ``reduce`` returns the gradients of the step before."""
        return isinstance(self.mode, OneStepLate)

    @property
    def _powersgd_column(self) -> list[str]:
        return ["Compression.powersgd"] if isinstance(self.compression, PowerSGD) else []

    @property
    def on_host(self) -> HostSettings | None:
        """How gradients are reduced on the host; None where operations of the graph do it."""
        powersgd = self.compression if isinstance(self.compression, PowerSGD) else None
        if not self.late and (powersgd is None or is_alone(self.process_set)):
            return None
        wire = getattr(self.compression, "wire", None) or "none"
        return HostSettings(self.op == Average, 1.0 / self.predivide, self.predivide, wire, powersgd, self.late)

    def stem_of(self, stem: str, sources: Sequence[Source]) -> str:
        """What the names of some sources' gradients begin with: what is kept of them for the next step is theirs alone.

        Args:
            stem: alike for all that is called alike, as two models that have one class.
            sources: what the gradients belong to.

        Raises:
            InvalidArgumentError: a source is no variable, so that what is kept would not be found in the next step.
        """
        how = self.on_host
        keeps = how is not None or getattr(self.compression, "wire", None) in tables.WITHOUT_FEEDBACK
        if not keeps or not self.process_set.included() or followed() is not None:
            return stem
        if not all(map(naming.is_variable, sources)):
            if how is None:
                return stem
            what = "OneStepLate" if self.late else "Compression.powersgd"
            raise InvalidArgumentError(
                f"{self.owner}: sources must be variables with {what}, which keeps something of each gradient for the next step, "
                "but some are tensors. Ask for the gradients of tf.Variables, or choose another mode or compression."
            )
        number = number_of(stem, sources, self.process_set)
        return stem if number == 0 else f"{stem}[{number}]"

    @as_it_is
    def reduce(
        self, gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Source]
    ) -> list[Gradient]:
        """The gradients, reduced over the ranks, in their order.

        Args:
            gradients: of the same shapes and dtypes on all ranks. One that is None here counts zeros if another rank
                has it, and stays None otherwise.
            names: identities of the gradients among the ranks; a graph adds a number to one that it has already.
            variables: what the gradients belong to.
        """
        if not self.process_set.included():
            return list(gradients)
        if (state := followed()) is not None:
            return self._survived(state, gradients, names, variables)
        reduced, agreement = self.complete(gradients, names, variables)
        plain_names, how = names, self.on_host
        names = [naming.claim(name) for name in names]
        present = [index for index, gradient in enumerate(reduced) if gradient is not None]
        dense = [index for index in present if not isinstance(reduced[index], tf.IndexedSlices)]
        if self.late and len(dense) < len(present):
            raise UnsupportedError(
                f"{self.owner}: gradients must be dense with OneStepLate, but some are tf.IndexedSlices. Set sparse_as_dense, or "
                "choose another mode."
            )
        if how is not None and dense:
            kept = on_host.kept_of(plain_names[0], variables, how, self.process_set)
            inputs, chosen = [reduced[index] for index in dense], [plain_names[index] for index in dense]
            for index, result in zip(dense, on_host.reduced(kept, inputs, chosen, dense), strict=True):
                reduced[index] = result
        for members in [] if how is not None else self._grouped(dense, variables):
            inputs = [reduced[index] for index in members]
            results = grouped_allreduce(inputs, op=self.op, name=names[members[0]], **self._factors())
            for index, result in zip(members, results, strict=True):
                reduced[index] = result
        for index in sorted(set(present) - set(dense)):
            reduced[index] = allreduce(reduced[index], op=self.op, name=names[index], **self._without_factors())
        presence.settle(agreement)
        return reduced

    def _survived(
        self, state: TransparentState, gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Source]
    ) -> list[Gradient]:
        """``reduce`` in a step that survives a change of the world. Gradients that are None must be so on all ranks."""
        given = {"elastic.State": True, "survives on the host": True}
        check_needs([*self.mode.columns, *self._powersgd_column], given, self.owner)
        assert not isinstance(self.compression, PowerSGD)  # refused
        name = naming.claim(names[0]) if names else ""
        return surviving.reduced(
            state, self.owner, gradients, name, self.op, self.process_set, self.compression, self.predivide, variables
        )

    def reduce_but_local(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        variables: Sequence[Source],
        local: Mapping[int, Source],
        scales_local: bool,
    ) -> list[Gradient]:
        """``reduce`` without the gradients of local variables, those that differ from rank to rank on purpose.

        Args:
            gradients: as for ``reduce``.
            names: as for ``reduce``.
            variables: as for ``reduce``.
            local: the local variables, by identity.
            scales_local: divide their gradients by the number of ranks, so that they match the averages beside them.
        """
        results = list(gradients)
        if not self.process_set.included():
            return results
        results = _but_local(self.reduce, results, names, variables, local)
        if scales_local:
            for index, variable in enumerate(variables):
                if id(variable) in local and results[index] is not None:
                    results[index] = divided_by_size(results[index], self.process_set)
        return results

    def complete_but_local(
        self,
        gradients: Sequence[Gradient],
        names: Sequence[str],
        variables: Sequence[Source],
        local: Mapping[int, Source],
    ) -> list[Gradient]:
        """The gradients that ``reduce_but_local`` will reduce, for graphs: the ends of a condition must have the same ones."""
        results = [self._densified(gradient) for gradient in gradients]
        if not self.process_set.included():
            return results
        return _but_local(lambda *shared: self.complete(*shared)[0], results, names, variables, local)

    def complete(
        self, gradients: Sequence[Gradient], names: Sequence[str], variables: Sequence[Source]
    ) -> tuple[list[Gradient], presence.Agreement | None]:
        """The gradients with zeros for those that only other ranks have; see ``presence.complete``."""
        return presence.complete(
            [self._densified(gradient) for gradient in gradients], names, variables, self.process_set
        )

    def _densified(self, gradient: Gradient) -> Gradient:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self.sparse_as_dense else gradient

    def _grouped(self, dense: list[int], variables: Sequence[Source]) -> list[list[int]]:
        """Places of the gradients that are one operation, for each operation."""
        groups = 1 if self.groups is None and tf.executing_eagerly() else self.groups
        return [[dense[each] for each in group] for group in grouped([variables[index] for index in dense], groups)]

    def _factors(self) -> dict[str, object]:
        return {
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide,
            **self._without_factors(),
        }

    def _without_factors(self) -> dict[str, object]:
        compression = Compression.none if isinstance(self.compression, PowerSGD) else self.compression
        return {"compression": compression, "process_set": self.process_set}


def _but_local(
    operate: Callable[[list[Gradient], list[str], list[Source]], list[Gradient]],
    gradients: Sequence[Gradient],
    names: Sequence[str],
    variables: Sequence[Source],
    local: Mapping[int, Source],
) -> list[Gradient]:
    """The gradients, those of all but the local variables as ``operate`` returns them."""
    results = list(gradients)
    shared = [index for index, variable in enumerate(variables) if id(variable) not in local]
    operated = operate(
        [gradients[index] for index in shared],
        [names[index] for index in shared],
        [variables[index] for index in shared],
    )
    for index, gradient in zip(shared, operated, strict=True):
        results[index] = gradient
    return results

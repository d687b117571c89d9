"""How a chat template is compiled: to code that works on plain values, with their origins beside them.

Jinja's own code generator decides on scopes, macros and blocks. What differs from it:

- beside each variable ``l_1_x`` stands ``o_1_x``, the origin of what it holds (`expressions.py`, `pairs.py`);
- what is printed goes to a flat list of values and origins, not joined and not turned into ``str``;
- a loop runs over plain items, and tells the trace whose turn is being written;
- what is compared, cut or made is charged for by its size (`budget.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE

from .expressions import Expressions
from .loops import counts_only, fields_read, items_of, targets, uses_loop
from .remembered import repeatable
from .sources import Pair, Printed, beside, flattened, namespaces_of, spelled

_IMPORTS: Final = {
    "pairs": {
        **{"box": "tt_box", "inside": "tt_inside", "of_item": "tt_of_item", "of_get": "tt_of_get"},
        **{"of_slice": "tt_of_slice", "paid": "tt_paid", "pieces_of": "tt_pieces_of", "parts_of": "tt_parts"},
        **{
            "rows": "tt_rows",
            "bounds": "tt_bounds",
            "length_of": "tt_length",
            "is_last": "tt_is_last",
            "items_of": "tt_items",
        },
        **{"neighbour": "tt_neighbour", "of_neighbour": "tt_of_neighbour"},
        **{"PLAIN": "tt_plain", "SIZED": "tt_sized", "TEXT": "tt_text", "PRINTED": "tt_printed"},
    },
    "trace": {"BEGINS": "tt_begins", "ENDS": "tt_ends"},
    "traced": {"TracedNone": "tt_none"},
    "remembered": {"recall": "tt_recall", "remember": "tt_remember"},
    "environment": {"TemplateNamespace": "tt_namespace", "attributes_of": "tt_attributes"},
}
_PAYING: Final = ("budget.steps = steps = budget.steps - 1", "if not steps & 31 or steps < 0: trace.pause(OUT)")
"""A round of a loop is a step."""
_PRINTING: Final[tuple[type[nodes.Node], ...]] = (
    *(nodes.Output, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Macro, nodes.Block, nodes.Include),
    *(nodes.Import, nodes.FromImport, nodes.Extends),
)


class TracingGenerator(Expressions):
    """Generates the code of a chat template."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted_loops = {}
        self._bound: frozenset[str] = frozenset()
        self._index = ""
        self._has_blocks = False
        self._resolved: dict[str, str] = {}
        self._depth = 0
        self._repeatable: dict[int, list[str]] = {}

    # -- frames and variables

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        self._has_blocks = node.find(nodes.Block) is not None
        self.namespaces = namespaces_of(node)
        for module, names in _IMPORTS.items():
            spelled = ", ".join(f"{name} as {short}" for name, short in names.items())
            self.writeline(f"from tokentrace.template.{module} import {spelled}")
        self.writeline("tt_here = object()")
        self._repeatable = repeatable(node, self.environment)
        super().visit_Template(node, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("trace = context.trace")
        self.writeline("concat = environment.joined")
        self.writeline("given = context.parent.get")
        self.writeline("stack, budget = trace.stack, trace.budget")

    def enter_frame(self, frame: Frame) -> None:
        if frame.buffer is None:  # of the template, or of a block
            frame.buffer = "out"
            self.writeline("out = []" if frame.block_frame else "out = trace.out")
        for target, (action, param) in frame.symbols.loads.items():
            origin, value = "None", "missing"
            if action == VAR_LOAD_PARAMETER:
                if target not in self._bound:
                    self.writeline(f"{beside(target)} = None")
                continue
            if action == VAR_LOAD_ALIAS:
                value, origin = str(param), beside(str(param))
            elif action == VAR_LOAD_RESOLVE:  # where there are blocks, the context also has what the template set
                value = self._resolved.pop(target, "") or self._resolve(str(param))
                origin = f"trace.origin_of({target})" if param == "messages" else "None"
            self.writeline(f"{target} = {value}")
            self.writeline(f"{beside(target)} = {origin}")

    def _resolve(self, name: str) -> str:
        return f"{self.get_resolve_func()}({name!r})" if self._has_blocks else f"given({name!r}, missing)"

    def leave_frame(self, frame: Frame, with_python_scope: bool = False) -> None:
        super().leave_frame(frame, with_python_scope)
        if with_python_scope and frame.block_frame and frame.buffer == "out":
            self.writeline("yield from environment.pieces(out)")

    def dump_local_context(self, frame: Frame) -> str:
        stores = frame.symbols.dump_stores().items()
        return f"{{{', '.join(f'{name!r}: tt_box({target}, {beside(target)})' for name, target in stores)}}}"

    def pop_assign_tracking(self, frame: Frame) -> None:
        """Only blocks look into the context for what the template around them has set."""
        names = self._assign_stack.pop()
        if frame.toplevel and self._has_blocks:
            for name in sorted(names):
                ref = frame.symbols.ref(name)
                self.writeline(f"context.vars[{name!r}] = tt_box({ref}, {beside(ref)})")

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        if not isinstance(node.target, nodes.Name):
            super().visit_Assign(node, frame)
            self._forget_origins(node.target, frame)
            return
        self.push_assign_tracking()
        pair = self.pair(node.node, frame).stored
        self.newline(node)
        self.visit(node.target, frame)
        self.write(f" = {pair.code}")
        ref = frame.symbols.ref(node.target.name)
        self.writeline(f"{beside(ref)} = {pair.origin}", node)
        self._forget_fields(ref)
        self.pop_assign_tracking(frame)
        key = node.node.arg if isinstance(node.node, nodes.Getitem) else None
        if isinstance(key, nodes.Name) and key.name == self._index:
            self.writeline(f"trace.assigned({ref}, {beside(ref)}, {frame.buffer})", node)

    def _forget_origins(self, target: nodes.Node, frame: Frame) -> None:
        """What was stored is boxed."""
        names = [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))
        for name in names:
            self.writeline(f"{beside(frame.symbols.ref(name.name))} = None")
            self._forget_fields(frame.symbols.ref(name.name))

    def _forget_fields(self, ref: str) -> None:
        """Nothing is known of the fields of what a variable holds."""
        known = [name for names in self.fields.get(ref, {}).values() for name in names if name]
        if known:
            self.writeline(f"{' = '.join(known)} = None")

    def visit_AssignBlock(self, node: nodes.AssignBlock, frame: Frame) -> None:
        super().visit_AssignBlock(node, frame)
        self._forget_origins(node.target, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        super().visit_Macro(node, frame)
        self._forget_origins(nodes.Name(node.name, "store"), frame)

    def visit_NSRef(self, node: nodes.NSRef, frame: Frame) -> None:
        if node.name not in self.namespaces or node.attr.startswith("_"):
            super().visit_NSRef(node, frame)
            return
        ref = frame.symbols.ref(node.name)
        self.write(f"(tt_attributes({ref}) if type({ref}) is tt_namespace else {ref})[{node.attr!r}]")

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body = [code_line("budget.step()"), *node.body]
        with self._function():
            return super().macro_body(node, frame)

    @contextlib.contextmanager
    def _function(self) -> Iterator[None]:
        """What is written becomes a function of its own, which cannot keep what it learns of variables around it."""
        kept, self.fields = self.fields, {}
        yield
        self.fields = kept

    # -- output

    def start_write(self, frame: Frame, node: nodes.Node | None = None) -> None:
        self.writeline(f"{frame.buffer} += (", node)

    def end_write(self, frame: Frame) -> None:
        self.write(", None)")

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        if hasattr(node, "line"):
            self.writeline(node.line.replace("OUT", str(frame.buffer)))
            return
        if frame.require_output_check:
            if self.has_known_extends:
                return
            self.writeline("if parent_template is None:")
            self.indent()
        self._write_output(node, frame)
        if frame.require_output_check:
            self.outdent()

    def _write_output(self, node: nodes.Output, frame: Frame) -> None:
        """One statement for each part that is computed, with the constants around it."""
        finalize = self._make_finalize()
        constant = ""
        parts: list[tuple[nodes.Expr, str, Printed]] = []  # with the constant before it
        for child in node.nodes:
            try:
                constant += self._output_child_to_const(child, frame, finalize)
            except Exception:  # not a constant, or one that fails: both are a matter for the run
                for printed in self._pieces(child, frame):
                    parts.append((child, constant, printed))
                    constant = ""
        for at, (child, before, printed) in enumerate(parts):
            after = constant if at == len(parts) - 1 else ""
            quick = spelled([before, *printed.quick, after])
            self.newline(child)
            self.write(f"{frame.buffer} += ({quick})")
            if printed.test:
                self.write(f" if {printed.test} else ({spelled([before, printed.otherwise, after])})")
        if not parts:
            self.writeline(f"{frame.buffer} += ({spelled([constant])})", node)

    def _pieces(self, node: nodes.Node, frame: Frame) -> Iterator[Printed]:
        """What an expression prints. A sum of texts is printed part by part: nothing is joined to be cut again."""
        if isinstance(node, nodes.Concat):
            for operand in node.nodes:
                yield self._piece(self.pair(operand, frame), operand)
            return
        summands = flattened(node)
        parts = [self.pair(part, frame) for part in summands]
        if len(parts) == 1:
            yield self._piece(parts[0], node)
        elif any(part.is_count or part.is_split for part in parts):
            yield self._piece(self.pair(node, frame), node)
        else:
            yield self._sum(parts, summands)

    def _sum(self, parts: list[Pair], summands: list[nodes.Node]) -> Printed:
        checks: list[str] = []
        quick: list[str | tuple[str, str]] = []
        boxed: list[str] = []
        for part, summand in zip(parts, summands, strict=True):
            if isinstance(summand, nodes.Const) and type(summand.value) is str:
                quick.append(summand.value)
                boxed.append(part.code)
            else:
                name = self.temporary_identifier()
                checks.append(f"(type({name} := {part.code}) is str or type({name}) in tt_text)")
                quick.append((name, part.origin))
                boxed.append(Pair(name, part.origin).boxed)
        return Printed(quick, " & ".join(checks), (f"environment.add({', '.join(boxed)})", "None"))

    def _piece(self, pair: Pair, node: nodes.Node) -> Printed:
        pair = pair.stored
        if pair.is_count or isinstance(node, (nodes.Const, nodes.TemplateData)):
            return Printed([(pair.code, "None")])
        value = self.temporary_identifier()
        test = f"type({value} := {pair.code}) is str or type({value}) in tt_printed"
        return Printed([(value, pair.origin)], test, (f"environment.shown({value}, {pair.origin})", "None"))

    # -- conditions and loops

    def visit_If(self, node: nodes.If, frame: Frame) -> None:
        inner = frame.soft()
        for word, branch in [("if", node), *(("elif", branch) for branch in node.elif_)]:
            self.writeline(f"{word} {self.condition(branch.test, inner)}:", branch)
            self.indent()
            self.blockvisit(branch.body, inner)
            self.outdent()
        if node.else_:
            self.writeline("else:")
            self.indent()
            self.blockvisit(node.else_, inner)
            self.outdent()

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if id(node) not in self._repeatable:
            self._write_for(node, frame)
            return
        items, start, written = self.value(node.iter, frame), self.temporary_identifier(), self.temporary_identifier()
        loop = f"(tt_here, {start!r})"
        unset = "".join(f" and given({name!r}, missing) is missing" for name in self._repeatable[id(node)])
        self.writeline(f"if ({written} := tt_recall({items}, {loop})) is not None{unset}:", node)
        self.indent()
        self.writeline(f"{frame.buffer} += {written}")
        self.outdent()
        self.writeline("else:")
        self.indent()
        self.writeline(f"{start} = len({frame.buffer})")
        self._write_for(node, frame)
        printed = frame.buffer == "out"
        self.writeline(f"if True{unset}: tt_remember({items}, {loop}, {frame.buffer}, {start}, printed={printed})")
        self.outdent()

    def _write_for(self, node: nodes.For, frame: Frame) -> None:
        kept, self._index = self._index, node.target.name if isinstance(node.target, nodes.Name) else ""
        is_silent = self._is_silent(node, frame)
        self.writeline("stack.append(trace.current)")
        self._depth += 1
        names = targets(node)
        if names is not None and not node.recursive and node.test is None and counts_only(node):
            self._plain_loop(node, names, is_silent, frame)
        else:
            with self._function():
                self._boxed_loop(node, is_silent, frame)
        self._depth -= 1
        if is_silent:
            self.writeline("trace.current = stack.pop()")
        else:
            before = self.temporary_identifier()
            self.writeline(f"if ({before} := stack.pop()) != trace.current: trace.left({before}, {frame.buffer})")
        self._index = kept

    def _is_silent(self, node: nodes.For, frame: Frame) -> bool:
        """Whether a loop only looks: it prints nothing, and so needs no marks."""
        if frame.buffer != "out" or node.recursive or next(node.find_all(_PRINTING), None) is not None:
            return False
        keys = [assign.node.arg for assign in node.find_all(nodes.Assign) if isinstance(assign.node, nodes.Getitem)]
        return not any(isinstance(key, nodes.Name) for key in keys)  # `messages[i]` may begin a turn

    def _boxed_loop(self, node: nodes.For, is_silent: bool, frame: Frame) -> None:
        """A loop as Jinja has it, over boxed items."""
        level = frame.inner().symbols.level
        item = f"l_{level}_{node.target.name}" if isinstance(node.target, nodes.Name) else "None"
        hook = f"trace.look({item}, None)" if is_silent else f"trace.round({item}, None, OUT)"
        node.body = [*map(code_line, (*_PAYING, hook)), *node.body]
        if node.test is not None:  # a round that the test skips is a round
            node.test = nodes.And(nodes.EnvironmentAttribute("round"), node.test)
        super().visit_For(node, frame)

    def _plain_loop(self, node: nodes.For, names: list[nodes.Name], is_silent: bool, frame: Frame) -> None:
        """A loop over plain items, which needs no object to count them."""
        inner, otherwise = frame.inner(), frame.inner()
        inner.loop_frame = True
        counted = uses_loop(node)
        index, found, origins, begins, rounds = (self.temporary_identifier() for _ in range(5))
        fields = self._fields(node, self._depth == 1 and not is_silent) if len(names) == 1 else {}
        known = {name: origin for name, (_, origin) in fields.items() if origin}
        self._write_rows(node, (found, origins, begins, rounds), counted, tuple(known), frame)
        loop = inner.symbols.declare_parameter("loop") if counted else ""
        if counted:
            self.counted_loops[loop] = index, found, origins
        inner.symbols.analyze_node(node, for_branch="body")
        if node.else_:
            otherwise.symbols.analyze_node(node, for_branch="else")
            never = self.temporary_identifier()
            self.writeline(f"{never} = True")
        for target, (action, param) in inner.symbols.loads.items():
            if action == VAR_LOAD_RESOLVE:  # the same in each round
                self._resolved[target] = self.temporary_identifier()
                self.writeline(f"{self._resolved[target]} = {self._resolve(str(param))}")
        refs = [inner.symbols.ref(target.name) for target in names]
        if len(refs) == 1:
            item = f"{refs[0]}, {beside(refs[0])}"
            self.fields[refs[0]] = fields
            bound = ", ".join(((index,) if counted else ()) + (item, *known.values()))
        else:
            item = "None, None"
            bound = ", ".join(f"{ref}, {beside(ref)}" for ref in refs)
            bound, rounds = (f"{index}, ({bound})", f"enumerate({found})") if counted else (bound, found)
        self.writeline(f"for {bound} in {rounds}:", node)
        self.indent()
        self._bound = frozenset((*refs, *(name for name in self.counted_loops)))
        self.enter_frame(inner)
        self._bound = frozenset()
        for line in _PAYING:
            self.writeline(line.replace("OUT", str(frame.buffer)))
        self._write_hook(item, begins if len(refs) == 1 else "True", is_silent, frame)
        values = [value for value, _ in self.fields.get(refs[0], {}).values() if value]
        if values:
            self.writeline(f"{' = '.join(values)} = None")
        self.blockvisit(node.body, inner)
        self.fields.pop(refs[0], None)
        self.counted_loops.pop(loop, None)  # another scope of this depth may have a ``loop`` of its own
        if node.else_:
            self.writeline(f"{never} = False")
        self.outdent()
        self.leave_frame(inner)
        if node.else_:
            self.writeline(f"if {never}:")
            self.indent()
            self.enter_frame(otherwise)
            self.blockvisit(node.else_, otherwise)
            self.leave_frame(otherwise)
            self.outdent()
        if self._assign_stack:
            self._assign_stack[-1].difference_update(inner.symbols.stores)

    def _write_hook(self, item: str, begins: str, is_silent: bool, frame: Frame) -> None:
        """A round tells whose turn begins with it."""
        hook = f"trace.look({item})" if is_silent else f"trace.round({item}, {frame.buffer})"
        self.writeline(f"if {begins} is True: {hook}")
        if begins != "True":
            message, mark = self.temporary_identifier(), f"; {frame.buffer} += ({begins}[MESSAGE + 1], None)"
            self.writeline(f"elif {begins} and ({message} := {item.split(', ')[1]}[1]) != trace.current:")
            self.write(f" trace.current = {message}" + ("" if is_silent else mark.replace("MESSAGE", message)))

    def _fields(self, node: nodes.For, origins: bool) -> dict[str, tuple[str, str]]:
        """Names for what is known in a round of the fields of its variable: values that are asked for again, and
        `origins`, if these are needed."""
        return {
            name: (
                self.temporary_identifier() if times > 1 else "",
                self.temporary_identifier() if origins else "",
            )
            for name, times in fields_read(node).items()
        }

    def _write_rows(
        self, node: nodes.For, names: tuple[str, ...], counted: bool, fields: tuple[str, ...], frame: Frame
    ) -> None:
        """What the loop runs over."""
        found, origins = names[:2]
        items = items_of(node.iter) if isinstance(node.target, nodes.Tuple) else None
        if items is None:
            pair = self.pair(node.iter, frame).stored
            given = f"{pair.code}, {pair.origin}, undefined, trace, {counted}, {fields!r}"
            self.writeline(f"{', '.join(names)} = tt_rows({given})", node)
            return
        pair = self.pair(items, frame).stored
        boxed = "environment.method(context, boxed, 'items')"
        if isinstance(node.iter, nodes.Filter):
            boxed = f"{self.filters['items']}(boxed)"
        self.writeline(f"{origins} = None")
        self.writeline(
            f"{found} = tt_items({pair.code}, {pair.origin}, lambda boxed: {boxed}, counted={counted})", node
        )


def code_line(code: str) -> nodes.Output:
    """A line of Python as a statement of a template; OUT stands for where its statements write to."""
    node = nodes.Output([])
    node.line = code  # type: ignore[attr-defined]
    return node

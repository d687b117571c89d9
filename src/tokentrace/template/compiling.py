"""Compiles a chat template to code on plain values that tracks their origins separately.

Jinja's own code generator handles scopes, macros and blocks. The differences:

- each variable ``l_1_x`` has an ``o_1_x``, the origin of its value (`expressions.py`,
  `pairs.py`);
- output is a flat list of values and origins;
- a loop tells the trace whose turn is being written, and runs over plain items where it can.

``{% for m in messages %}<{{ m.role }}>{% endfor %}`` becomes, with shorter names::

    trace.enter()
    items, origins = rows(messages, o_messages)
    for index, (m, o_m) in enumerate(zip(items, origins)):
        trace.round(m, o_m, out)
        if type(t := (m.get("role") if … else environment.field(m, o_m, "role"))) in printed:
            out += ("<", None, t, inside(o_m, "role"), ">", None)
        else:
            out += ("<", None, text_of(box(t, inside(o_m, "role"))), None, ">", None)
    trace.leave(out)
"""

from typing import Any

from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_PARAMETER, VAR_LOAD_RESOLVE

from .expressions import Code, Expressions, LoopNames, origin_name
from .syntax import is_word, items_of, plain_targets, summands, with_children

_IMPORTS = """\
from tokentrace.template.budget import charged as tt_charged, weighed as tt_weighed
from tokentrace.template.pairs import PLAIN as tt_plain, PRINTED as tt_printed, SIZED as tt_sized, TEXT as tt_text
from tokentrace.template.pairs import bounds as tt_bounds, box as tt_box, inside as tt_inside, paid as tt_paid
from tokentrace.template.pairs import of_item as tt_of_item, of_pieces as tt_of_pieces
from tokentrace.template.pairs import of_cut as tt_of_cut, split as tt_split
from tokentrace.template.pairs import item_rows as tt_item_rows, rows as tt_rows
from tokentrace.template.traced import TracedNone as tt_none, text_of as tt_text_of
"""


class TracingGenerator(Expressions):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop_variable = ""
        """The variable of the innermost loop."""
        self._assigned: frozenset[str] = frozenset()
        """Python names that a loop itself assigns, with their origins."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for line in _IMPORTS.splitlines():
            self.writeline(line)
        super().visit_Template(node, frame)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("trace = context.trace")
        self.writeline("concat, lookup = environment.joined, context.parent.get")

    def enter_frame(self, frame: Frame) -> None:
        if frame.buffer is None:
            frame.buffer = "out"
            self.writeline("out = trace.out")
        for target, (action, param) in frame.symbols.loads.items():
            value, origin = "missing", "None"
            if action == VAR_LOAD_ALIAS:
                value, origin = str(param), origin_name(str(param))
            elif action == VAR_LOAD_RESOLVE:
                value = f"lookup({param!r}, missing)"
                origin = f"trace.origin_of({target})" if param == "messages" else "None"
            if action != VAR_LOAD_PARAMETER:
                self.writeline(f"{target} = {value}")
            if target not in self._assigned:
                self.writeline(f"{origin_name(target)} = {origin}")

    def pop_assign_tracking(self, frame: Frame) -> None:
        """Export no variables to the context: no block would read them."""
        self._assign_stack.pop()

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        if not isinstance(node.target, nodes.Name):
            super().visit_Assign(node, frame)
            self._after_store(node.target, frame)
            return
        self.push_assign_tracking()
        code = self.code(node.node, frame)
        self.newline(node)
        self.visit(node.target, frame)
        self.write(f" = {code.value}")
        ref = frame.symbols.ref(node.target.name)
        self.writeline(f"{origin_name(ref)} = {code.origin}", node)
        self.pop_assign_tracking(frame)
        key = node.node.arg if isinstance(node.node, nodes.Getitem) else None
        if isinstance(key, nodes.Name) and key.name == self._loop_variable:
            # {% set message = messages[i] %}
            show = f"trace.show({ref}, {origin_name(ref)}, {frame.buffer})"
            self.writeline(f"if isinstance({ref}, dict): {show}", node)

    def _after_store(self, target: nodes.Node, frame: Frame) -> None:
        """Clear a stored value's origin; tell the trace what a namespace stores."""
        for part in with_children(target):
            if isinstance(part, nodes.Name):
                self.writeline(f"{origin_name(frame.symbols.ref(part.name))} = None")
            elif isinstance(part, nodes.NSRef):
                self.writeline(f"trace.store({frame.symbols.ref(part.name)}, {part.attr!r})")

    def visit_AssignBlock(self, node: nodes.AssignBlock, frame: Frame) -> None:
        super().visit_AssignBlock(node, frame)
        self._after_store(node.target, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        super().visit_Macro(node, frame)
        self._after_store(nodes.Name(node.name, "store"), frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        node.body = [code_line("trace.budget.step()"), *node.body]
        return super().macro_body(node, frame)

    def start_write(self, frame: Frame, node: nodes.Node | None = None) -> None:
        self.writeline(f"{frame.buffer} += (", node)

    def end_write(self, frame: Frame) -> None:
        self.write(", None)")

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        if hasattr(node, "line"):
            self.writeline(node.line.replace("OUT", str(frame.buffer)))
            return
        finalize = self._make_finalize()
        constant = ""
        for child in node.nodes:
            try:
                constant += self._output_child_to_const(child, frame, finalize)
            except Exception:  # not a constant, or one that fails
                for part in child.nodes if isinstance(child, nodes.Concat) else [child]:
                    self._print(constant, part, frame)
                    constant = ""
        if constant:
            self.writeline(f"{frame.buffer} += ({constant!r}, None)", node)

    def _print(self, before: str, node: nodes.Node, frame: Frame) -> None:
        has_call = any(isinstance(part, nodes.Call) for part in with_children(node))
        if before and has_call:  # a macro may have tags
            self.writeline(f"{frame.buffer} += ({before!r}, None)", node)
            before = ""
        lead = f"{before!r}, None, " if before else ""
        parts = summands(node)
        codes = [self.code(part, frame) for part in parts]
        if len(codes) == 1 or any(code.is_count for code in codes):
            code, value = self.code(node, frame), self.fresh()
            test = f"type({value} := {code.value}) in tt_printed"
            printed = f"{value}, {code.origin}, "
            boxed = (
                f"tt_text_of(tt_box({value}, {code.origin}))"  # box it now: a namespace may change later
            )
        else:
            tests: list[str] = []
            for at, code in enumerate(codes):
                if not is_word(parts[at]):
                    codes[at] = Code(self.fresh(), code.origin)
                    tests.append(f"(type({codes[at].value} := {code.value}) in tt_text)")
            test = " & ".join(tests) or "True"  # evaluates all of them
            printed = "".join(f"{code.value}, {code.origin}, " for code in codes)
            boxed = f"environment.add({', '.join(code.boxed for code in codes)})"
        self.writeline(f"if {test}: {frame.buffer} += ({lead}{printed})", node)
        self.writeline(f"else: {frame.buffer} += ({lead}{boxed}, None)", node)

    def visit_If(self, node: nodes.If, frame: Frame) -> None:
        for branch in (node, *node.elif_):
            branch.test = nodes.Not(nodes.Not(branch.test))  # only the truth matters: see `condition`
        super().visit_If(node, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        before = self._loop_variable
        self._loop_variable = node.target.name if isinstance(node.target, nodes.Name) else ""
        self.writeline("trace.enter()", node)
        if (targets := plain_targets(node)) is not None:
            self._plain_loop(node, targets, frame)
        else:
            name = self._loop_variable
            item = f"l_{frame.inner().symbols.level}_{name}" if name else "None"
            node.body = [code_line(f"trace.round({item}, None, OUT)"), *node.body]
            if node.test is not None:  # a round that the test skips is a step, too
                node.test = nodes.And(nodes.EnvironmentAttribute("round"), node.test)
            super().visit_For(node, frame)
        self.writeline(f"trace.leave({frame.buffer})", node)
        self._loop_variable = before

    def _plain_loop(self, node: nodes.For, targets: list[nodes.Name], frame: Frame) -> None:
        loop = LoopNames(*(self.fresh() for _ in range(3)))
        self._write_rows(node, loop, frame)
        inner = frame.inner()
        inner.loop_frame = True
        name = inner.symbols.declare_parameter("loop")
        inner.symbols.analyze_node(node, for_branch="body")
        variables = [inner.symbols.ref(target.name) for target in targets]
        row = ", ".join(f"{variable}, {origin_name(variable)}" for variable in variables)
        rows = f"zip({loop.items}, {loop.origins})" if len(variables) == 1 else loop.items
        self.writeline(f"for {loop.index}, ({row}) in enumerate({rows}):", node)
        self.indent()
        self._assigned = frozenset((*variables, name))
        self.enter_frame(inner)
        self._assigned = frozenset()
        item = row if len(variables) == 1 else "None, None"
        self.writeline(f"trace.round({item}, {frame.buffer})", node)
        self.loops[name] = loop
        self.blockvisit(node.body, inner)
        del self.loops[name]  # another scope of this depth may have its own ``loop``
        self.outdent()
        self.leave_frame(inner)
        if self._assign_stack:
            self._assign_stack[-1] -= inner.symbols.stores

    def _write_rows(self, node: nodes.For, loop: LoopNames, frame: Frame) -> None:
        mapping = items_of(node.iter) if isinstance(node.target, nodes.Tuple) else None
        code = self.code(mapping or node.iter, frame)
        pair = f"{code.value}, {code.origin}"
        if mapping is None:
            self.writeline(f"{loop.items}, {loop.origins} = tt_rows({pair})", node)
            return
        items = "environment.method(context, boxed, 'items')"
        if isinstance(node.iter, nodes.Filter):
            items = f"{self.filters['items']}(boxed)"
        self.writeline(f"{loop.items} = tt_item_rows({pair}, lambda boxed: {items})", node)


def code_line(code: str) -> nodes.Output:
    """A line of Python as a statement of a template; OUT is the list that is written to."""
    node = nodes.Output([])
    node.line = code  # type: ignore[attr-defined]
    return node

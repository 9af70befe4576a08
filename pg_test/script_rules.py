"""The rules of pgspot over SQL scripts that run one after the other: prints a line for each thing that they find.

pgspot's own program cannot read a function whose body is in SQL's own form (BEGIN ATOMIC), and leaves out what
comes after it. Such a body is parsed when the function is created, as a view is, so it is looked at as a statement.
"""

import sys
from argparse import Namespace

from pglast import ast, parse_sql, split
from pglast.printers.dml import AExprKindPrinter
from pglast.stream import RawStream
from pgspot.state import Counter, State
from pgspot.visitors import visit_sql


def quantified(word):
    """Prints an operator before ALL or ANY. pglast 7.21 raises TypeError if the operator has a schema."""

    def print_it(_, node, output):
        output.print_node(node.lexpr)
        output.write(" OPERATOR")
        with output.expression(True):
            output.print_symbol(node.name)
        output.write(f" {word}")
        with output.expression(True):
            output.print_node(node.rexpr)

    return print_it


AExprKindPrinter.AEXPR_OP_ALL = quantified("ALL")
AExprKindPrinter.AEXPR_OP_ANY = quantified("ANY")

OF_ROWS = ("lease_keep_rows(", "lease_guard_row(", "lease_release_rows(")


class PathOfCaller:
    """The functions that write with their caller's search_path. Their first line sets a safe one for all else."""

    def __contains__(self, signature):
        return signature.startswith(OF_ROWS)


def of_extension(text):
    """The script of pg_fence_lite may be run again, so it replaces these functions. In an extension's script PostgreSQL refuses
    to replace a function that is not the extension's."""
    for name in OF_ROWS:
        text = text.replace(f"CREATE OR REPLACE FUNCTION {name}", f"CREATE FUNCTION {name}")
    return text


arguments = Namespace(
    proc_without_search_path=PathOfCaller(), plpgsql=True, ignore=[], ignore_lang=[], sql_fn=[], summary_only=False
)
counter = Counter(arguments)
state = State(counter)


def look(text):
    statement = parse_sql(text)[0].stmt
    if not (isinstance(statement, ast.CreateFunctionStmt) and statement.sql_body):
        visit_sql(state, text, toplevel=True)
        return
    bodies = [statement.sql_body]
    while bodies:
        body = bodies.pop()
        if isinstance(body, tuple):
            bodies.extend(body)
        elif isinstance(body, ast.ReturnStmt):
            visit_sql(state, "SELECT " + RawStream()(body.returnval))
        else:
            visit_sql(state, RawStream()(body))


for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        # PostgreSQL passes over what is for psql.
        lines = [line for line in file if not line.startswith("\\")]
        for text in split("".join(lines)):
            before = counter.errors + counter.warnings + counter.unknowns
            look(of_extension(text))
            if counter.errors + counter.warnings + counter.unknowns > before:
                print(f"  in {path}: {text.strip().splitlines()[0]}")
print(counter)
sys.exit(0 if counter.is_clean() else 1)

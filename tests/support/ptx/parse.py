"""PTX text as instructions.

It reads what CuTeDSL's compiler writes: one kernel, registers declared with their bits, and inline
assembly in braces, whose registers and labels are its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

REGISTER_FILES = {"pred": 1, "b16": 2, "b32": 4, "b64": 8}  # bytes of a register

_LABEL = re.compile(r"([$\w]+)\s*:(?!:)")
_REGISTERS = re.compile(r"([%$\w]+)(?:<(\d+)>)?")


class PtxError(Exception):
    """The kernel cannot be run, or did what a kernel must not."""


class Reg(NamedTuple):
    file: str  # of `REGISTER_FILES`
    row: int  # in it


class Imm(NamedTuple):
    bits: int  # two's complement, or those of a float


class Name(NamedTuple):
    text: str  # a parameter, shared memory, a special register ("%tid.x") or "_"


class Vector(NamedTuple):
    items: tuple[Reg | Imm | Name, ...]


class Address(NamedTuple):
    base: Reg | Imm | Name
    offset: int
    coords: tuple[Reg | Imm | Name, ...]  # of a tensor


Operand = Reg | Imm | Name | Vector | Address


@dataclass(frozen=True)
class Instruction:
    op: str  # "add.s32"
    operands: tuple[Operand, ...]
    text: str
    guard: Reg | None = None
    negated: bool = False  # whether lanes run it whose guard is false
    target: int = -1  # of a branch

    @property
    def dtype(self) -> str:
        return self.op.rpartition(".")[2]


@dataclass
class Program:
    """One kernel.

    Attributes:
      registers: how many each file has.
      labels: where branches may arrive.
    """

    name: str = ""
    params: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REGISTER_FILES, 0))
    labels: set[int] = field(default_factory=set)


def parse(text: str) -> Program:
    """Returns the kernel that `text` defines.

    Raises:
      PtxError: something in it is unknown.
    """
    text = re.sub(r"//[^\n]*", "", text)
    head, _, body = text.partition(".entry")
    if not body:
        raise PtxError("the text has no kernel")
    name, _, body = body.partition("(")
    params, _, body = body.partition(")")
    program = Program(name.strip(), re.findall(r"(\w+)(?:\[\d+\])?\s*(?:,|$)", params))
    _Body(program).read(body[body.index("{") :])
    return program


class _Body:
    """Reads statements; names are looked up from the innermost braces outwards."""

    def __init__(self, program: Program):
        self.program = program
        self.scopes: list[dict[str, Reg]] = []
        self.open: list[int] = []  # numbers of the scopes
        self.count = 0
        self.labels: dict[tuple[int, str], int] = {}
        self.branches: list[tuple[int, str, tuple[int, ...]]] = []

    def read(self, body: str) -> None:
        at = 0
        while at < len(body):
            if body[at].isspace() or body[at] == ";":
                at += 1
            elif body[at] == "{":
                self.count += 1
                self.open.append(self.count)
                self.scopes.append({})
                at += 1
            elif body[at] == "}":
                self.open.pop()
                self.scopes.pop()
                at += 1
            elif label := _LABEL.match(body, at):
                self.labels[self.open[-1], label[1]] = len(self.program.instructions)
                at = label.end()
            else:
                end = body.index(";", at)
                self.statement(" ".join(body[at:end].split()))
                at = end + 1
        for at, label, scopes in self.branches:
            found = [self.labels[s, label] for s in reversed(scopes) if (s, label) in self.labels]
            if not found:
                raise PtxError(f"no label {label}")
            instruction = self.program.instructions[at]
            self.program.instructions[at] = replace(instruction, target=found[0])
        self.program.labels = set(self.labels.values())

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(" ", 2)
            self.declare(kind[1:].replace("f", "b"), names)
        elif not text.startswith(".pragma"):
            self.program.instructions.append(self.instruction(text))

    def declare(self, file: str, names: str) -> None:
        if file not in REGISTER_FILES:
            raise PtxError(f"registers of unknown kind {file}: {names}")
        for name, count in _REGISTERS.findall(names):
            for own in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self.scopes[-1][own] = Reg(file, self.program.registers[file])
                self.program.registers[file] += 1

    def instruction(self, text: str) -> Instruction:
        whole, guard, negated = text, None, False
        if text[0] == "@":
            name, text = text[1:].split(" ", 1)
            negated = name[0] == "!"
            found = self.operand(name.lstrip("!"))
            assert isinstance(found, Reg)
            guard = found
        op, _, rest = text.partition(" ")
        if op.partition(".")[0] == "bra":
            here = len(self.program.instructions)
            self.branches.append((here, rest.strip(), tuple(self.open)))
            return Instruction("bra", (), whole, guard, negated)
        operands = tuple(self.operand(part) for part in _split(rest))
        return Instruction(op, operands, whole, guard, negated)

    def operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self.simple(part) for part in _split(text[1:-1])))
        if "|" in text:  # a result and a predicate
            return Vector(tuple(self.simple(part) for part in text.split("|")))
        if text[0] == "[":
            base, *coords = _split(text[1:-1])
            base, _, offset = base.partition("+")
            inside = self.operand(coords[0]) if coords else Vector(())
            assert isinstance(inside, Vector)
            return Address(self.simple(base), int(offset or 0), inside.items)
        return self.simple(text)

    def simple(self, text: str) -> Reg | Imm | Name:
        text = text.strip()
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", text):
            return Imm(int(text[2:], 16))
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Imm(int(text.rstrip("U"), 0))
        return Name(text)


def _split(text: str) -> list[str]:
    """Returns the parts between commas that no bracket holds."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]

"""The languages of code: which nodes of tree-sitter's grammars are functions, and which hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from tree_sitter import Parser


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Nodes of any grammar that stand between a class and its functions, or between a file and what a condition guards.
_BETWEEN = _names(
    """
    block body body_statement class_body declaration_list field_declaration_list enum_body interface_body
    enum_body_declarations enum_declaration_list program if_statement elif_clause else_clause try_statement
    except_clause finally_clause with_statement preproc_if preproc_ifdef preproc_else preproc_elif
    linkage_specification statement_block export_statement decorated_definition template_declaration
    ambient_declaration compound_statement expression_statement
    """
)


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A grammar of tree-sitter."""

    package: str
    functions: frozenset[str]
    classes: frozenset[str]  # what holds functions, or is a type of its own
    function: str = "language"  # of the package, which returns the grammar
    values: frozenset[str] = field(default=frozenset())  # declarations that are functions if their value is one

    @property
    def between(self) -> frozenset[str]:
        """Nodes that are looked into for functions."""
        return _BETWEEN


_JAVASCRIPT = _names("function_declaration generator_function_declaration method_definition")
_CONSTANTS = _names("lexical_declaration variable_declaration")
_TYPESCRIPT_CLASSES = _names(
    """class_declaration abstract_class_declaration interface_declaration enum_declaration type_alias_declaration
    internal_module module"""
)

GRAMMARS = {
    "python": Grammar(
        package="tree_sitter_python", functions=_names("function_definition"), classes=_names("class_definition")
    ),
    "javascript": Grammar(
        package="tree_sitter_javascript",
        functions=_JAVASCRIPT,
        classes=_names("class_declaration"),
        values=_CONSTANTS,
    ),
    "typescript": Grammar(
        package="tree_sitter_typescript",
        function="language_typescript",
        functions=_JAVASCRIPT | _names("function_signature"),
        classes=_TYPESCRIPT_CLASSES,
        values=_CONSTANTS,
    ),
    "tsx": Grammar(
        package="tree_sitter_typescript",
        function="language_tsx",
        functions=_JAVASCRIPT | _names("function_signature"),
        classes=_TYPESCRIPT_CLASSES,
        values=_CONSTANTS,
    ),
    "go": Grammar(
        package="tree_sitter_go",
        functions=_names("function_declaration method_declaration"),
        classes=_names("type_declaration"),
    ),
    "rust": Grammar(
        package="tree_sitter_rust",
        functions=_names("function_item macro_definition"),
        classes=_names("impl_item trait_item mod_item struct_item enum_item union_item"),
    ),
    "java": Grammar(
        package="tree_sitter_java",
        functions=_names("method_declaration constructor_declaration compact_constructor_declaration"),
        classes=_names(
            """class_declaration interface_declaration enum_declaration record_declaration
            annotation_type_declaration"""
        ),
    ),
    "c": Grammar(
        package="tree_sitter_c",
        functions=_names("function_definition"),
        classes=_names("struct_specifier union_specifier enum_specifier type_definition"),
    ),
    "cpp": Grammar(
        package="tree_sitter_cpp",
        functions=_names("function_definition"),
        classes=_names("class_specifier struct_specifier union_specifier enum_specifier namespace_definition"),
    ),
    "csharp": Grammar(
        package="tree_sitter_c_sharp",
        functions=_names("method_declaration constructor_declaration operator_declaration local_function_statement"),
        classes=_names(
            """class_declaration interface_declaration struct_declaration enum_declaration record_declaration
            namespace_declaration"""
        ),
    ),
    "ruby": Grammar(
        package="tree_sitter_ruby", functions=_names("method singleton_method"), classes=_names("class module")
    ),
    "php": Grammar(
        package="tree_sitter_php",
        function="language_php",
        functions=_names("function_definition method_declaration"),
        classes=_names(
            """class_declaration interface_declaration trait_declaration enum_declaration
            namespace_definition"""
        ),
    ),
    "bash": Grammar(package="tree_sitter_bash", functions=_names("function_definition"), classes=frozenset()),
}

_SUFFIXES = {
    "python": ".py .pyi .pyw",
    "javascript": ".js .jsx .mjs .cjs",
    "typescript": ".ts .mts .cts",
    "tsx": ".tsx",
    "go": ".go",
    "rust": ".rs",
    "java": ".java",
    "c": ".c",
    "cpp": ".h .cpp .cc .cxx .hpp .hh .hxx .cu .cuh",  # a header of C is one of C++, nearly always
    "csharp": ".cs",
    "ruby": ".rb .rake .gemspec",
    "php": ".php",
    "bash": ".sh .bash",
    "markdown": ".md .markdown .mdx",
}
LANGUAGES = {suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes.split()}
"""The language of a file, by the end of its name in lower case; what is not here is text."""

PACKAGES = ("tree_sitter", *sorted({grammar.package for grammar in GRAMMARS.values()}))
"""The packages that code needs."""


@cache
def parser(language: str) -> Parser:
    """A parser of a language, for one thread at a time."""
    grammar = GRAMMARS[language]
    try:
        from tree_sitter import Language, Parser

        package: Any = import_module(grammar.package)
    except ImportError as error:
        raise MissingExtraError(f"code of {language} needs {error.name}: pip install 'millpond[code]'") from None
    return Parser(Language(getattr(package, grammar.function)()))

"""The model catalogue: what is read, and what is said about what is wrong with it."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_agent.errors import CatalogError, UnknownModelError
from edge_agent.models.catalog import (
    Catalog,
    HubSource,
    Licence,
    LocalSource,
    PackagePart,
    PackageSource,
    Template,
    TemplateKind,
    UrlSource,
    load_catalog,
)

SHA256 = "ab" * 32
ENTRY = f"""\
  - name: tiny
    family: tiny
    parameters_billions: 0.1
    quantisation: Q4_0
    context_tokens: 2048
    template: from-file
    licence: Apache-2.0
    file: tiny.gguf
    size_bytes: 1000
    sha256: {SHA256}
    sources:
      - local: ~/tiny.gguf
"""


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def load(tmp_path: Path, text: str) -> Catalog:
    return load_catalog(write(tmp_path / "catalog.yaml", text))


def problems(tmp_path: Path, text: str) -> str:
    with pytest.raises(CatalogError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_the_catalogue_that_is_shipped_is_sound():
    catalog = load_catalog()
    assert {"smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"} <= catalog.entries.keys()
    for entry in catalog.entries.values():
        for source in entry.sources:
            if isinstance(source, HubSource):  # a branch could move to another file
                assert re.fullmatch("[0-9a-f]{40}", source.revision), entry.name


def test_shipped_entry_is_derived_from_one_with_sources():
    catalog = load_catalog()
    derived = catalog.get("smollm2-135m-instruct-q4_0")
    base = catalog.base_of(derived)
    assert base is catalog.get("smollm2-135m-instruct-q4_1")
    assert derived.sha256 is None
    assert not derived.sources
    assert (derived.family, derived.context_tokens) == (base.family, base.context_tokens)
    assert derived.quantisation == "Q4_0"
    assert catalog.base_of(base) is None


def test_every_kind_of_source_is_read_in_order(tmp_path):
    catalog = load(
        tmp_path,
        "models:\n"
        + ENTRY.replace(
            "      - local: ~/tiny.gguf\n",
            """\
      - hub: {repository: someone/tiny, file: sub/tiny.gguf, revision: abc}
      - package: {package: tiny-gguf, version: 1.0.0, path: tiny/tiny.gguf}
      - package:
          parts:
            - {package: tiny-1, version: "1", path: a}
            - {package: tiny-2, version: "2", path: b}
      - url: https://user:secret@example.org/tiny.gguf?key=secret
      - local: $MODELS/tiny.gguf
""",
        ),
    )
    sources = catalog.get("tiny").sources
    assert sources == (
        HubSource("someone/tiny", "sub/tiny.gguf", "abc"),
        PackageSource((PackagePart("tiny-gguf", "1.0.0", "tiny/tiny.gguf"),)),
        PackageSource((PackagePart("tiny-1", "1", "a"), PackagePart("tiny-2", "2", "b"))),
        UrlSource("https://user:secret@example.org/tiny.gguf?key=secret"),
        LocalSource("$MODELS/tiny.gguf"),
    )
    assert [source.describe() for source in sources] == [
        "hub someone/tiny@abc",
        "package tiny-gguf==1.0.0",
        "package tiny-1==1 and 1 more",
        "url https://example.org/tiny.gguf",
        "local $MODELS/tiny.gguf",
    ]


def test_templates_and_licences_have_three_and_two_forms(tmp_path):
    text = "templates:\n  plain: '{{ messages[0].content }}'\nmodels:\n"
    text += ENTRY
    text += ENTRY.replace("tiny", "raw").replace("from-file", "raw")
    text += (
        ENTRY.replace("tiny", "own")
        .replace("from-file", "plain")
        .replace("licence: Apache-2.0", "licence: {name: Own Terms, url: https://example.org/t}")
    )
    catalog = load(tmp_path, text)
    assert catalog.get("tiny").template == Template(TemplateKind.FROM_FILE)
    assert catalog.get("raw").template == Template(TemplateKind.RAW)
    assert not catalog.get("raw").template.accepts_chats
    assert catalog.get("own").template == Template(
        TemplateKind.OVERRIDE, "{{ messages[0].content }}"
    )
    assert catalog.get("tiny").licence == Licence("Apache-2.0")
    assert catalog.get("own").licence == Licence("Own Terms", "https://example.org/t")


def test_everything_wrong_is_reported_at_once_with_the_nearest_known_key(tmp_path):
    said = problems(
        tmp_path,
        """\
        modells: []
        models:
          - name: Tiny
            famly: tiny
            parameters_billions: -1
            quantisation: q4_0
            context_tokens: 2048.5
            template: chatml
            licence: Apache-2.0
            file: ../tiny.gguf
            size_bytes: many
            sha256: abc
            sources:
              - hub: {repository: tiny, file: /etc/passwd, revision: abc}
              - package: {package: -r, version: 1.0, path: ../x}
              - url: ftp://example.org/x
              - {}
              - ftp: x
        """,
    )
    for expected in (
        "unknown key 'modells'; did you mean 'models'?",
        "models[0] (Tiny): name 'Tiny' must be lower-case letters",
        "unknown key 'famly'; did you mean 'family'?",
        "family is missing",
        "parameters_billions must be above 0, not -1",
        "quantisation 'q4_0' must be a llama.cpp name in capitals",
        "context_tokens must be a whole number, not 2048.5",
        "template 'chatml' is none of from-file, raw",
        "file '../tiny.gguf' must be a plain file name that ends in .gguf",
        "size_bytes must be a number, not a text",
        "sha256 'abc' must be 64 hexadecimal digits",
        "sources[0]: hub: repository 'tiny' must be OWNER/NAME",
        "sources[0]: hub: file '/etc/passwd' must be a relative path",
        "sources[1]: package: package '-r' must be the name of a Python package",
        "sources[1]: package: version must be a text, not the float 1.0; put it in quotes",
        "sources[1]: package: path '../x' must be a path relative to the wheel's root",
        "sources[2]: url 'ftp://example.org/x' must be an http or https address",
        "sources[3]: must have exactly one of hub, package, url, local",
        "sources[4]: unknown key 'ftp'",
    ):
        assert expected in said
    assert "The model catalogue has 19 problems" in said


def test_a_key_given_twice_is_a_problem_and_not_silently_the_last(tmp_path):
    said = problems(tmp_path, "models:\n" + ENTRY + "    sha256: " + "cd" * 32 + "\n")
    assert "line 14: the key 'sha256' is given twice" in said


def test_a_name_used_twice_and_a_file_wanted_twice_are_problems(tmp_path):
    assert "the name tiny is used twice" in problems(tmp_path, "models:\n" + ENTRY + ENTRY)
    other = ENTRY.replace("name: tiny", "name: other")
    assert "tiny and other both want the file tiny.gguf" in problems(
        tmp_path, "models:\n" + ENTRY + other
    )


def derived(name: str, base: str, more: str = "") -> str:
    text = f"  - name: {name}\n    derive_from: {base}\n    quantisation: Q8_0\n"
    return f"{text}    file: {name}.gguf\n{more}"


def test_a_derived_entry_has_no_digest_and_one_level_only(tmp_path):
    said = problems(
        tmp_path,
        "models:\n"
        + ENTRY
        + derived("a", "tiny", "    sha256: " + SHA256 + "\n")
        + derived("b", "a")
        + derived("c", "tinny"),
    )
    assert "(a): sha256 does not belong here: the quantiser makes a derived entry" in said
    assert "(b): derive_from names a, which is derived itself" in said
    assert "(c): derive_from names no entry: 'tinny'; did you mean 'tiny'?" in said


def test_what_is_wrong_with_a_base_is_not_said_again_of_what_derives_from_it(tmp_path):
    said = problems(
        tmp_path, "models:\n" + ENTRY.replace("family: tiny", "family: ''") + derived("a", "tiny")
    )
    assert said.count("family") == 1


def test_a_derived_entry_takes_what_it_leaves_out_and_keeps_what_it_says(tmp_path):
    catalog = load(
        tmp_path, "models:\n" + ENTRY + derived("a", "tiny", "    context_tokens: 512\n")
    )
    assert catalog.get("a").context_tokens == 512
    assert catalog.get("a").licence == Licence("Apache-2.0")


def test_a_second_catalogue_adds_and_replaces(tmp_path):
    main = write(tmp_path / "main.yaml", "models:\n" + ENTRY)
    own = write(
        tmp_path / "own.yaml",
        "models:\n"
        + ENTRY.replace("context_tokens: 2048", "context_tokens: 99")
        + derived("added", "tiny"),
    )
    catalog = load_catalog(main, own)
    assert list(catalog.entries) == ["tiny", "added"]
    assert catalog.get("tiny").context_tokens == 99
    assert catalog.get("added").context_tokens == 99


def test_an_unknown_model_is_answered_with_the_nearest_names(tmp_path):
    catalog = load(tmp_path, "models:\n" + ENTRY)
    with pytest.raises(UnknownModelError, match=r"no model named 'tinny'. Did you mean tiny\?"):
        catalog.get("tinny")
    with pytest.raises(UnknownModelError, match="models list"):
        catalog.get("something else entirely")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: [", "is not valid YAML"),
        ("- a list", "must be a mapping, not a list"),
        ("models: {tiny: 1}", "models must be a list, not a mapping"),
        ("models:\n  - just a text", "models[0]: must be a mapping, not a text"),
        ("templates: {raw: x}", "raw does not belong here"),
        ("models:\n  - !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_a_file_of_another_shape_is_refused_in_words(tmp_path, text, expected):
    assert expected in problems(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CatalogError, match=r"absent\.yaml.*No such file"):
        load_catalog(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"models: \xff\xfe")
    with pytest.raises(CatalogError, match="not UTF-8"):
        load_catalog(binary)


def test_an_empty_catalogue_has_no_models(tmp_path):
    assert not load(tmp_path, "").entries


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["name", "sources", "hub", "package", "parts", "url", "derive_from", "licence"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VALUES, max_size=3), VALUES)
def test_whatever_the_file_holds_the_answer_is_a_catalogue_or_a_catalogue_error(
    tmp_path, models, templates
):
    path = tmp_path / "any.yaml"
    path.write_text(
        yaml.safe_dump({"models": models, "templates": templates}, allow_unicode=False),
        encoding="utf-8",
    )
    try:
        catalog = load_catalog(path)
    except CatalogError:
        return
    assert all(entry.file.endswith(".gguf") for entry in catalog.entries.values())

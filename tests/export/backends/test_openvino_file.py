"""The XML of OpenVINO models, read without openvino."""

import io
import itertools
import json

import pytest

from kd_export import ExportError, UntrustedArtifact
from kd_export._backends.openvino import (
    check_constants,
    read_model,
    read_openvino_schema,
    with_schema,
)

DATA = '<data element_type="f32" shape="2, 3" offset="8" size="24" />'
MODEL = f"""<?xml version="1.0"?>
<net name="n" version="11"><layers><layer>{DATA}</layer></layers>
<rt_info><kd_export value="" /></rt_info></net>
"""


def test_the_schema_comes_back_as_it_was() -> None:
    text = json.dumps({"a": "<&>\u00e9 &amp; '"})
    assert read_openvino_schema(with_schema(MODEL.encode(), text)) == text


def test_a_model_without_a_place_for_the_schema_is_refused() -> None:
    """A replacement that finds nothing left the schema as it was, without a word."""
    for old, count in ((b"<kd_export", 0), (b"</rt_info>", 2)):
        new = b"<other" if count == 0 else b'<kd_export value="" /></rt_info>'
        with pytest.raises(ExportError, match=f"expected one place.*got {count}"):
            with_schema(MODEL.encode().replace(old, new), "{}")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        MODEL.encode("utf-16"),
        b"\xef\xbb\xbf" + MODEL.encode(),
        MODEL.replace('"1.0"', '"1.0" encoding="utf-7"').encode(),
        MODEL.replace("<net ", "<!DOCTYPE net [<!ENTITY a SYSTEM '/etc/passwd'>]><net ").encode(),
        b"\x08\x08\x12\x05<net " + MODEL.encode(),  # an ONNX model whose producer is "<net "
        b"GGUF<net " + MODEL.encode(),
    ],
)
def test_openvino_gets_no_other_kind_of_file(content: bytes) -> None:
    with pytest.raises(ExportError, match="not an OpenVINO model"):
        read_model(io.BytesIO(content))


@pytest.mark.parametrize("value", [b"\xff", b"&#1;" * 10 + b"\x80"])
def test_a_schema_that_is_not_text_is_refused(value: bytes) -> None:
    content = MODEL.encode().replace(b'value=""', b'value="' + value + b'"')
    with pytest.raises(ExportError, match="is not text"):
        read_openvino_schema(content)


def test_tensors_are_parts_of_the_file() -> None:
    check_constants(MODEL.encode(), "n.bin", 32)
    with pytest.raises(UntrustedArtifact, match=r"bytes at 8 of `n\.bin`, which has 31"):
        check_constants(MODEL.encode(), "n.bin", 31)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('shape="2, 3"', 'shape="4611686018427387904, 2, 3"'),  # whose bytes are 0 in 64 bits
        ('shape="2, 3"', 'shape="4611686018427387906, 3"'),  # and here 24
        ('shape="2, 3"', 'shape="-2, -3"'),
        ('shape="2, 3"', 'shape="?"'),
        ('shape="2, 3"', ""),
        ('offset="8"', 'offset="-8"'),
        ('offset="8"', 'offset="18446744073709551608"'),
        ('offset="8"', ""),
        ('size="24"', 'size="23"'),
        ('"f32"', '"string"'),
        ('"f32"', '"f64"'),
    ],
)
def test_a_tensor_of_other_sizes_is_refused(old: str, new: str) -> None:
    content = MODEL.replace(old, new)
    assert content != MODEL
    with pytest.raises(UntrustedArtifact):
        check_constants(content.encode(), "n.bin", 1000)


def test_a_model_that_is_cut_or_too_deep_is_refused() -> None:
    with pytest.raises(ExportError, match="not whole XML"):
        check_constants(MODEL[:-10].encode(), "n.bin", 32)
    deep = MODEL.replace("<rt_info>", "".join(itertools.repeat("<a>", 100_000)))
    with pytest.raises(ExportError, match="nested too deeply"):
        check_constants(deep.encode(), "n.bin", 32)

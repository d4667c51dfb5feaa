"""The process that runs vl-convert for pictures.py. It imports nothing else of gptexp, to start fast."""

import base64
import json
import sys
from itertools import groupby
from xml.etree import ElementTree

VEGA_LITE = "6.4"  # newest version in vl-convert 1.9; the page and the PNGs use the same
SCALE = 2.0
NOTHING = {"mark": "point", "data": {"values": []}}
LINES = "pathgroup"  # part of the class of a group of lines in the SVG


def simplified(drawing: str) -> str:
    """An SVG that resvg draws in a tenth of the time. Only where soft edges of lines lie on each other, pixels differ.

    Lines of a layer are clipped together, not each alone. Neighbours that look alike become one line. Labels of an axis
    that has no room for them go.
    """
    root = ElementTree.fromstring(drawing)
    for labels in root.iterfind(".//{*}text[@opacity='0']/.."):
        for label in labels.findall("{*}text[@opacity='0']"):
            labels.remove(label)
    for layer in root.iterfind(".//{*}g"):
        if LINES in layer.get("class", ""):
            for group in layer.iterfind(".//{*}g[@clip-path]"):
                layer.set("clip-path", group.attrib.pop("clip-path"))  # they are all the same rectangle: the chart
            lines = [(group, line) for group in layer.iterfind(".//{*}g") for line in group.findall("{*}path[@stroke]")]
            for look, alike in groupby(lines, lambda pair: {**pair[1].attrib, "d": ""}):
                if look.get("opacity", "1") != "1":  # where two lines cross, they are darker
                    continue
                (_, first), *others = alike
                first.set("d", "".join([first.attrib["d"], *(line.attrib["d"] for _, line in others)]))
                for group, line in others:
                    group.remove(line)
    return ElementTree.tostring(root, encoding="unicode")


def main() -> None:
    """Answer each line of JSON: a specification with its PNG in base64, the text of a script with its bundle."""
    import vl_convert

    vl_convert.vegalite_to_svg(NOTHING, vl_version=VEGA_LITE)  # loads Vega, while there is no request yet
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, str):
            answer = vl_convert.javascript_bundle(request, vl_version=VEGA_LITE)
        else:
            drawing = vl_convert.vegalite_to_svg(request, vl_version=VEGA_LITE)
            answer = base64.b64encode(bytes(vl_convert.svg_to_png(simplified(drawing), scale=SCALE))).decode()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What members serve over HTTP."""

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def fetch(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    """Status, content type and body of what this host serves there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(of: list[Sample], name: str, **labels: str) -> float:
    """The one sample of that name with at least these labels."""
    found = [one.value for one in of if one.name == name and labels.items() <= one.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0]

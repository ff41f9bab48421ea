# SPDX-License-Identifier: Apache-2.0
"""What `ci/test` is made of. Only Python's own library is needed, because it must run before .venv is looked at."""

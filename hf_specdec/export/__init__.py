"""From a measured setup to the command of another engine: `hf-specdec export`.

What each engine takes, by version, is data: `rules/*.json`, with where it is from and which release it was checked
against. The code here only fills it in, so that a new release is a new entry.
"""

from .engines import ENGINES, Engine, load_engine
from .render import Export, Setup, export


__all__ = ["ENGINES", "Engine", "Export", "Setup", "export", "load_engine"]

"""Progress bars, those of jaxgemm.autotune: see jaxgemm/autotune/progress.py."""

from jaxgemm.autotune.progress import bar as bar

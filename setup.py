"""Package metadata comes from settings.ini, the one place for name, version, dependencies and extras."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
config = ConfigParser(delimiters=["="], interpolation=None)
config.read(root / "settings.ini")
cfg = config["DEFAULT"]
extras = {key.removesuffix("_requirements"): value.split() for key, value in cfg.items() if key.endswith("_requirements")}
extras["all"] = sorted({req for name in cfg["all_extras"].split() for req in extras[name]})

# The wheel carries what an installed `iclr26 reproduce` needs: notebooks, kernels and small data, mapped below iclr26/share.
share = {f"iclr26.share.{name}": name for name in ("nbs", "kernels", "data")}
package_data = {package: [str(p.relative_to(root / folder)) for p in sorted((root / folder).rglob("*"))
                          if p.is_file() and not {".ipynb_checkpoints", "__pycache__"} & set(p.parts)]
                for package, folder in share.items()}

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"],
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0",
    long_description=(root / "README.md").read_text(encoding="utf8") if (root / "README.md").exists() else "",
    long_description_content_type="text/markdown", url=cfg["git_url"],
    packages=find_packages(include=["iclr26", "iclr26.*"]) + list(share), package_dir=share,
    package_data={"iclr26": ["py.typed"], **package_data},
    install_requires=cfg["requirements"].split(), extras_require=extras, python_requires=f">={cfg['min_python']}",
    entry_points={"console_scripts": cfg["console_scripts"].split("\n")}, zip_safe=False,
)

# Spack's recipe: packages/py_ringtrain/package.py of a repository of packages (api v2.0).
#
#   spack install py-ringtrain +torch
#
# A release gets its line below, with the digest of its sdist, when it is there: spack checksum py-ringtrain

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyRingtrain(PythonPackage):
    """Data-parallel training for PyTorch and TensorFlow scripts: the Horovod API on a small native core."""

    pypi = "ringtrain/ringtrain-0.1.0.tar.gz"

    license("Apache-2.0", checked_by="ringtrain")

    variant("torch", default=False, description="Train with PyTorch")
    variant("tensorflow", default=False, description="Train with TensorFlow")
    variant("jax", default=False, description="Train with JAX")
    variant("mpi", default=False, description="Let an MPI connect the ranks; without it TCP does")

    depends_on("cxx", type="build")
    conflicts("platform=darwin", msg="ringtrain runs on Linux only")
    conflicts("platform=windows", msg="ringtrain runs on Linux only")

    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-cffi@1.16:", type=("build", "run"))
    depends_on("py-numpy@1.24:", type="run")
    depends_on("py-click@8.1:", type="run")
    depends_on("py-pyyaml@6.0:", type="run")
    depends_on("py-cloudpickle@2.2:", type="run")

    # Found when it runs: another one than that of the build will do.
    depends_on("py-torch@2.4:", type="run", when="+torch")
    depends_on("py-tensorflow@2.20:", type="run", when="+tensorflow")
    depends_on("py-jax@0.7.2:", type="run", when="+jax")
    depends_on("py-optax@0.2.5:", type="run", when="+jax")
    depends_on("py-mpi4py@4.0:", type="run", when="+mpi")

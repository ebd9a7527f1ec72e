"""Faults seeded into ``feature_maps/``."""

from tests.faults.fault import ORACLE, Fault

FAULTS = [
    Fault("the sign fix of the orthogonal draws is gone", "feature_maps/random_features.py",
          "Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]", "Q = Q * 1.0", "tests/linear/test_favor.py"),
    Fault("half precision by default is decomposed", "feature_maps/random_features.py", "width, width, dtype=wide)", "width, width)",
          "tests/engine/test_defaults.py -k 'half_precision and FavorPlus'"),
    Fault("products pair a number with itself", "feature_maps/features.py", "for j in range(1, self.nu + 1)",
          "for j in range(self.nu)", ORACLE + "DPFP"),
    Fault("half the squared norm is forgotten", "feature_maps/random_features.py", "z.sub_((x.square().sum(-1) / 2",
          "z.sub_((x.square().sum(-1)", ORACLE + "FavorPlus"),
    Fault("damped rows are scaled too much", "feature_maps/random_features.py", "return W * factor.sqrt(), bias",
          "return W * factor, bias", ORACLE + "FavorPlusPlus"),
]  # fmt: skip

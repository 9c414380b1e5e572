"""Images in place of tokens: `embedding = patches(…)`, and `head = classes(…)`."""

from typing import Annotated, Literal

from moec.grammar.spec.base import Doc, Node, PositiveInt, at_least, at_most

MAX_IMAGE = 65_536


class Patches(Node):
    """Square images, cut into a grid of square patches, each a token: a learned linear map of its pixels."""

    word = "patches"
    source = "Dosovitskiy et al. 2020, arXiv 2010.11929, equation 1"
    image: Annotated[int, at_least(1), at_most(MAX_IMAGE), Doc("height and width of an image, in pixels")]
    size: Annotated[PositiveInt, Doc("height and width of a patch; divides `image`")]
    channels: Annotated[PositiveInt, Doc("numbers per pixel")] = 3
    positions: Annotated[Literal["learned", "none"], Doc("a learned vector per place of the grid, added")] = "learned"

    # A patch has no id: nothing pads, separates or multiplies.
    tied, padding, separator, multiplier, logits_multiplier = False, None, None, 1.0, 1.0
    segments, packs, padding_id = False, False, None

    @property
    def side(self) -> int:
        """Patches in a row of the grid, and rows."""
        return self.image // self.size

    @property
    def tokens(self) -> int:
        """Patches of an image: the length of every sequence without a class token."""
        return self.side**2


class Classes(Node):
    """One of several classes for each image: a linear map, with a bias, of the mean of its normed patches.

    With `pool = first` a learned token, the same for each image, stands before the patches, takes part in every layer,
    and is read in place of the mean (Dosovitskiy et al. 2020, arXiv 2010.11929, section 3.1, equations 1 and 4).
    """

    word = "classes"
    source = "mean over patches: Zhai et al. 2022, arXiv 2106.04560, section 3.2"
    positional = ("count",)
    count: Annotated[PositiveInt, Doc("number of classes; labels are 0 up to one below it")]
    pool: Annotated[
        Literal["mean", "first"], Doc("what is read of an image: the mean of its patches, or a class token before them")
    ] = "mean"

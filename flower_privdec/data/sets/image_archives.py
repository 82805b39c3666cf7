"""Public images, as torchvision unpacks them; nothing is downloaded."""

from __future__ import annotations

from flower_privdec.data.dataset import Dataset, Request, Source
from flower_privdec.data.image_sets import read_images


class MnistData(Dataset):
    """Handwritten digits."""

    name = "mnist"
    line = "60,000 + 10,000 digits 28x28, 10 classes; root has MNIST/raw"

    def read(self, request: Request) -> Source:
        """Read the files under the root."""
        return read_images("MNIST", request)


class FashionMnistData(Dataset):
    """Pieces of clothing."""

    name = "fashion-mnist"
    line = "60,000 + 10,000 pieces of clothing 28x28, 10 classes; root has FashionMNIST/raw"

    def read(self, request: Request) -> Source:
        """Read the files under the root."""
        return read_images("FashionMNIST", request)


class CifarData(Dataset):
    """Small colour images."""

    name = "cifar10"
    line = "50,000 + 10,000 colour images 32x32, 10 classes; root has cifar-10-batches-py"

    def read(self, request: Request) -> Source:
        """Read the files under the root."""
        return read_images("CIFAR10", request)

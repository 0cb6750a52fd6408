#[cfg(feature = "gpu")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Autodiff, Backend, ExtensionType,
    autodiff::{checkpoint::strategy::CheckpointStrategy, ops::NodeGuard},
    tensor::FloatTensor,
};

/// An argument or a result of an operation that may be left out: an [`Option`] that Burn's stream knows of.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "gpu"))]
pub enum Optional<B: Backend> {
    /// No tensor.
    Absent,
    /// A tensor.
    Present(FloatTensor<B>),
}

impl<B: Backend> From<Option<FloatTensor<B>>> for Optional<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

impl<B: Backend> Optional<B> {
    /// The tensor, if there is one.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }

    /// The tensor, if there is one, by reference.
    pub fn as_option(&self) -> Option<&FloatTensor<B>> {
        match self {
            Self::Absent => None,
            Self::Present(tensor) => Some(tensor),
        }
    }
}

impl<B: Backend, C: CheckpointStrategy> Optional<Autodiff<B, C>> {
    /// The tensor below autodiff, and its node in the graph.
    pub(crate) fn into_parts(self) -> (Optional<B>, Option<NodeGuard>) {
        let (tensor, node) = self.into_option().map(|tensor| tensor.into_parts()).unzip();
        (tensor.into(), node)
    }
}

#[cfg(feature = "gpu")]
impl From<Option<TensorSpec>> for OptionalMetadata {
    fn from(tensor: Option<TensorSpec>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

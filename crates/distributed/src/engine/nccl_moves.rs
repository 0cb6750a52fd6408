//! Where tensors lie that NCCL, or an exchange of two ranks, moves.

use super::{
    Engine, EngineError,
    exchange::Exchange,
    exchange_plan::{self, Piece},
    nccl::Nccl,
    nccl_library::DataType,
    places::Place,
};
use crate::control::lock;
use blackburn_backend::{
    cuda_memory::{AnyTensor, CudaMemory},
    graph::{Identity, Progress},
};
use burn::tensor::{DType, Tensor};
use std::collections::HashSet;

/// Where one tensor is, and where it goes, if anything comes for it.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub(super) from: u64,
    pub(super) to: Option<u64>,
    pub(super) count: usize,
    pub(super) dtype: DataType,
    /// The one rank that gives or gets it, if it is not all.
    pub(super) root: Option<usize>,
}

/// Moves, and what keeps the memory in place until they are asked for.
pub(super) struct Moves {
    pub(super) moves: Vec<Move>,
    pub(super) ordinal: usize,
    pub(super) _memory: Vec<CudaMemory>,
}

impl<E: Engine> Nccl<E> {
    /// Where these tensors are, and where they go, once all that computes them was asked for. The device is not
    /// flushed for it: CubeCL waits then for all that it was asked for up to the flush before.
    pub(super) fn moves(&self, pairs: Vec<Pair>) -> Result<Option<Moves>, EngineError> {
        if pairs.is_empty() {
            return Ok(None);
        }
        let (mut tensors, mut sizes) = (Vec::new(), Vec::new());
        for (tensor, to, root) in pairs {
            let (count, dtype) = (tensor.dims()[0], self.data_type(tensor.dtype())?);
            sizes.push((count, dtype, to.is_some(), root));
            tensors.push(tensor);
            tensors.extend(to);
        }
        let memory = CudaMemory::of_all(tensors).map_err(|error| self.wrong(error))?;
        let ordinal = memory.first().map_or(0, |memory| memory.ordinal);
        let mut addresses = memory.iter().map(|memory| memory.address);
        let moves = sizes.into_iter().map_while(|(count, dtype, comes, root)| {
            let from = addresses.next()?;
            let to = if comes { Some(addresses.next()?) } else { None };
            Some(Move { from, to, count, dtype, root })
        });
        Ok(Some(Moves { moves: moves.collect(), ordinal, _memory: memory }))
    }

    pub(super) fn data_type(&self, dtype: DType) -> Result<DataType, EngineError> {
        match dtype {
            DType::F16 => Ok(DataType::Float16),
            DType::BF16 => Ok(DataType::Bfloat16),
            DType::F32 => Ok(DataType::Float32),
            DType::F64 => Ok(DataType::Float64),
            other => Err(self.wrong(format!("was asked to move {other:?}, and moves floats"))),
        }
    }

    /// Where the tensors lie that are added up in place, which asks for those alone that were not there last time.
    pub(super) fn placed(&self, tensors: &[AnyTensor]) -> Result<Option<Vec<Place>>, EngineError> {
        let known = |tensor: &AnyTensor| Some((tensor.identity?, tensor.clone()));
        let Some(all) = tensors.iter().map(known).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let mut places = lock(&self.places);
        let identities: HashSet<Identity> = all.iter().map(|(identity, _)| *identity).collect();
        places.retain(|identity, _| identities.contains(identity));
        let new: Vec<_> =
            all.iter().filter(|(identity, _)| !places.contains_key(identity)).cloned().collect();
        if !new.is_empty() {
            let (identities, tensors): (Vec<Identity>, Vec<AnyTensor>) = new.into_iter().unzip();
            let memory = CudaMemory::spans_of(tensors).map_err(|error| self.wrong(error))?;
            let found = memory.iter().map(|CudaMemory { address, bytes, ordinal, .. }| Place {
                address: *address,
                bytes: *bytes,
                ordinal: *ordinal,
            });
            places.extend(identities.into_iter().zip(found));
        }
        Ok(all.iter().map(|(identity, _)| places.get(identity).copied()).collect())
    }

    /// The milestone at which a tensor moves, where it does not wait for the end of its pass.
    pub(super) fn milestone(
        &self,
        tensor: &AnyTensor,
        place: &Place,
        progress: Option<&Progress>,
    ) -> Result<Option<u32>, EngineError> {
        let milestone = progress.and_then(|progress| progress.milestone(tensor.identity?));
        let dtype = self.data_type(tensor.dtype())?;
        let moves = self.size == 2 && exchange_plan::serves(place.address, place.bytes, dtype);
        Ok(milestone.filter(|_| moves))
    }

    /// Takes from `moves` those that move beside the pass, if any do. Both ranks are given the same.
    pub(super) fn early(
        &self,
        moves: &mut Vec<(Move, Option<u32>)>,
        ordinal: usize,
    ) -> Result<Vec<Piece>, EngineError> {
        let piece = |(Move { from, count, dtype, .. }, milestone): &(Move, Option<u32>)| {
            let bytes = count * dtype.size();
            Some(Piece { address: *from, bytes, dtype: *dtype, milestone: (*milestone)? })
        };
        let pieces: Vec<Piece> = moves.iter().filter_map(piece).collect();
        if pieces.is_empty() {
            return Ok(pieces);
        }
        let mut met = lock(&self.exchange);
        let exchange = match &mut *met {
            Some(exchange) => exchange,
            none => {
                let bytes = exchange_plan::bytes_of(&pieces);
                let exchange = Exchange::meet(&self.control, ordinal, bytes);
                let exchange = exchange.map_err(|error| self.wrong(error))?;
                *lock(&self.reach) = exchange.as_ref().map(Exchange::reach);
                none.insert(exchange)
            }
        };
        match exchange {
            Some(exchange) if exchange.fits(&pieces) => {
                exchange.choose_way(&self.control).map_err(|error| self.wrong(error))?;
                moves.retain(|(_, milestone)| milestone.is_none());
                Ok(pieces)
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// A tensor, where it goes, and its root.
pub(super) type Pair = (Tensor<1>, Option<Tensor<1>>, Option<usize>);

/// What becomes of tensors, and those of them that have elements, with memory for what comes.
pub(super) fn paired(
    tensors: Vec<(Tensor<1>, Option<usize>)>,
    comes: impl Fn(Option<usize>) -> bool,
) -> (Vec<Tensor<1>>, Vec<Pair>) {
    let (mut results, mut pairs) = (Vec::with_capacity(tensors.len()), Vec::new());
    for (tensor, root) in tensors {
        let (count, dtype, place) = (tensor.dims()[0], tensor.dtype(), tensor.device());
        let to = comes(root).then(|| Tensor::<1>::empty([count], (&place, dtype)));
        results.push(to.as_ref().unwrap_or(&tensor).clone());
        if count > 0 {
            pairs.push((tensor, to, root));
        }
    }
    (results, pairs)
}

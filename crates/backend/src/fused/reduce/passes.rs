//! Reductions by the routines of cubek, which Burn's own reductions are launched through, too.

use super::plan::{Device, Parts, Plan, Problem, Routine, Split};
use crate::{
    declined::unsupported,
    tensors::{Location, contiguous_tensor},
};
use blackburn_kernels::{DeviceProfile, KernelError, buffer::Buffer, plane_units};
use burn_backend::{
    DType, Shape,
    cubecl::{dtype_to_elem_type, elem_type_to_dtype},
};
use burn_cubecl::tensor::CubeTensor;
use burn_std::Metadata;
use cubecl::{client::Client, tensor_vector_size_parallel, tensor_vector_size_perpendicular};
use cubek::reduce::{
    ReduceDtypes, ReduceError, ReduceStrategy, ReduceWithIndicesDtypes,
    components::instructions::ReduceOperationConfig as Operation,
    launch::{RoutineStrategy, VectorizationStrategy},
    reduce, reduce_with_indices,
    routines::{BlueprintStrategy, cube::CubeStrategy, plane::PlaneStrategy, unit::UnitStrategy},
};

/// `x` along `axis`, in the type `out`: contiguous, without dimensions of one element.
///
/// # Errors
///
/// [`KernelError::Unsupported`] where the device runs no routine for it.
pub(super) fn along(
    x: &CubeTensor,
    axis: usize,
    operation: Operation,
    out: DType,
) -> Result<CubeTensor, KernelError> {
    let (x, axis) = without_ones(x, axis);
    run(&x, axis, operation, out, plan(&x, axis, operation))
}

/// The same, where Burn's own way is slower.
///
/// # Errors
///
/// As [`along`], and where Burn's own way is as fast.
pub(super) fn along_faster(
    x: &CubeTensor,
    axis: usize,
    operation: Operation,
    out: DType,
) -> Result<CubeTensor, KernelError> {
    let (x, axis) = without_ones(x, axis);
    run(&x, axis, operation, out, faster(plan(&x, axis, operation))?)
}

/// The extremes of `x` along `axis`, and where they are.
///
/// # Errors
///
/// As [`along_faster`].
pub(super) fn extremes_faster(
    x: &CubeTensor,
    axis: usize,
    operation: Operation,
    indices: DType,
) -> Result<[CubeTensor; 2], KernelError> {
    let (x, axis) = without_ones(x, axis);
    let Plan::Once(routine) = faster(plan(&x, axis, operation))? else {
        return Err(unsupported(super::OP, "places of extremes in two passes"));
    };
    let element = dtype_to_elem_type(x.dtype);
    let dtypes = ReduceWithIndicesDtypes {
        input: element,
        values: element,
        indices: dtype_to_elem_type(indices),
        accumulation: element,
    };
    let outputs = [x.dtype, indices].map(|dtype| output(&x, axis, dtype));
    let [values, places] = outputs.clone();
    let strategy = strategy(routine, has_planes(&x.client, x.dtype));
    let (client, x) = (x.client.clone(), x.binding());
    let places = places.binding();
    let run = reduce_with_indices(
        &client,
        x,
        values.binding(),
        places,
        axis,
        strategy,
        operation,
        dtypes,
    );
    run.map_err(declined)?;
    Ok(outputs)
}

/// `x` as one dimension, if its elements fill their memory.
pub(super) fn flat(x: &CubeTensor) -> Option<CubeTensor> {
    let (sizes, strides) = (x.meta.shape(), x.meta.strides());
    let mut dims: Vec<(usize, usize)> =
        strides.iter().copied().zip(sizes.iter().copied()).filter(|(_, size)| *size != 1).collect();
    dims.sort_unstable();
    let mut next = 1;
    for (stride, size) in dims {
        if stride != next {
            return None;
        }
        next *= size;
    }
    Some(viewed(x, &[next], &[1]))
}

/// What two passes have between them.
pub(super) fn between(operation: Operation, input: DType) -> DType {
    match operation {
        // Truth is not kept in 8 bits: not every device has operations of planes for those.
        Operation::Any | Operation::All => DType::U32,
        // What sums are made in: nothing rounds between the passes.
        _ => elem_type_to_dtype(operation.precision(dtype_to_elem_type(input), None).accumulation),
    }
}

fn faster(plan: Plan) -> Result<Plan, KernelError> {
    match plan {
        Plan::Once(Routine::Unit) => Err(unsupported(super::OP, "nothing faster than Burn's own")),
        plan => Ok(plan),
    }
}

fn plan(x: &CubeTensor, axis: usize, operation: Operation) -> Plan {
    let (sizes, strides) = (x.meta.shape(), x.meta.strides());
    let bytes = dtype_to_elem_type(x.dtype).size();
    let widths = x.client.io_optimized_vector_sizes(bytes);
    let is_of_rows = strides[axis] == 1;
    let problem = Problem {
        outputs: sizes.num_elements() / sizes[axis],
        length: sizes[axis],
        vector: match is_of_rows {
            true => tensor_vector_size_parallel(widths, sizes, strides, axis),
            false => tensor_vector_size_perpendicular(widths, sizes, strides, axis),
        },
        bytes,
        is_of_rows,
        parts: match operation {
            Operation::Sum | Operation::Prod => Parts::Equal,
            Operation::Max | Operation::Min | Operation::MaxAbs => Parts::Overlapping,
            Operation::Any | Operation::All => Parts::Overlapping,
            // The mean of whole means is another one, and places are counted along the whole dimension.
            _ => Parts::Never,
        },
    };
    problem.plan(Device {
        multiprocessors: DeviceProfile::of(&x.client).multiprocessors,
        has_planes: has_planes(&x.client, x.dtype),
    })
}

/// Whether all planes are of one size and have operations for `dtype`.
fn has_planes(client: &Client, dtype: DType) -> bool {
    // NVIDIA's planes exchange truth of 8 bits as 32; others need not know it.
    let exchange =
        |bytes: usize| bytes > 1 || DeviceProfile::of(client).compute_capability.is_some();
    plane_units(client) > 1 && exchange(dtype_to_elem_type(dtype).size())
}

fn run(
    x: &CubeTensor,
    axis: usize,
    operation: Operation,
    out: DType,
    plan: Plan,
) -> Result<CubeTensor, KernelError> {
    match plan {
        Plan::Once(routine) => pass(x, axis, operation, out, routine),
        Plan::Twice { split, first, last } => {
            let parts = in_parts(x, axis, split);
            let left = pass(&parts, axis + 1, operation, between(operation, x.dtype), first)?;
            let (left, axis) = without_ones(&left, axis);
            pass(&left, axis, operation, out, last)
        }
    }
}

/// One launch.
fn pass(
    x: &CubeTensor,
    axis: usize,
    operation: Operation,
    out: DType,
    routine: Routine,
) -> Result<CubeTensor, KernelError> {
    let (input, output_type) = (dtype_to_elem_type(x.dtype), dtype_to_elem_type(out));
    let dtypes = ReduceDtypes {
        input,
        output: output_type,
        accumulation: operation.precision(input, Some(output_type)).accumulation,
    };
    let y = output(x, axis, out);
    let strategy = strategy(routine, has_planes(&x.client, x.dtype));
    let (from, to) = (x.clone().binding(), y.clone().binding());
    reduce(&x.client, from, to, axis, strategy, operation, dtypes).map_err(declined)?;
    Ok(y)
}

/// Memory for one number of each along `axis`.
fn output(x: &CubeTensor, axis: usize, dtype: DType) -> CubeTensor {
    let mut shape = x.meta.shape().clone();
    shape[axis] = 1;
    let buffer = Buffer::empty(&x.client, shape.num_elements(), dtype_to_elem_type(dtype));
    contiguous_tensor(x, buffer, shape, dtype)
}

fn strategy(routine: Routine, has_planes: bool) -> ReduceStrategy {
    let routine = match routine {
        Routine::Unit => RoutineStrategy::Unit(BlueprintStrategy::Inferred(UnitStrategy)),
        // The units of a plane meet once, at the end.
        Routine::Plane => {
            let plane = PlaneStrategy { independent: true };
            RoutineStrategy::Plane(BlueprintStrategy::Inferred(plane))
        }
        Routine::Cube => {
            let cube = CubeStrategy { use_planes: has_planes };
            RoutineStrategy::Cube(BlueprintStrategy::Inferred(cube))
        }
    };
    let vectorization = VectorizationStrategy { parallel_output_vectorization: false };
    // Sizes are not compiled in.
    ReduceStrategy { routine, vectorization, autotune_level: Default::default() }
}

/// The same elements without the dimensions of one, which hide from cubek that others are walked in vectors.
fn without_ones(x: &CubeTensor, axis: usize) -> (CubeTensor, usize) {
    let (sizes, strides) = (x.meta.shape(), x.meta.strides());
    let kept: Vec<usize> =
        (0..sizes.num_dims()).filter(|dim| *dim == axis || sizes[*dim] != 1).collect();
    let [shape, steps] = [
        kept.iter().map(|dim| sizes[*dim]).collect::<Vec<_>>(),
        kept.iter().map(|dim| strides[*dim]).collect(),
    ];
    let axis = kept.iter().filter(|dim| **dim < axis).count();
    (viewed(x, &shape, &steps), axis)
}

/// `axis` as two dimensions: parts, and what is in a part.
fn in_parts(x: &CubeTensor, axis: usize, split: Split) -> CubeTensor {
    let mut sizes: Vec<usize> = x.meta.shape().iter().copied().collect();
    let mut strides: Vec<usize> = x.meta.strides().iter().copied().collect();
    sizes.splice(axis..=axis, [split.parts, split.length]);
    strides.splice(axis..=axis, [split.step * strides[axis], strides[axis]]);
    viewed(x, &sizes, &strides)
}

/// The memory of `x` by other sizes.
fn viewed(x: &CubeTensor, sizes: &[usize], strides: &[usize]) -> CubeTensor {
    let Location { client, device } = Location::of(x);
    let meta = Metadata::new(Shape::from(sizes.to_vec()), strides);
    CubeTensor::new(client, x.handle.clone(), meta, device, x.dtype)
}

fn declined(error: ReduceError) -> KernelError {
    unsupported(super::OP, &error.to_string())
}

//! Modules with seeded parameters, and what they compute.

use crate::{
    plain::Tensors,
    tensors::{tensor, values},
};
use blackburn_reference::{random::normal, storage::Storage};
use burn::{
    module::{ModuleMapper, ModuleVisitor, Param},
    optim::GradientsParams,
    prelude::*,
    tensor::FloatDType,
};
use libtest_mimic::Failed;

/// `module` with parameters of ordinary size in `storage`, the same each time: weights of a deviation
/// that keeps that of their input, factors about 1, and biases that are not small. `adjust` is given the
/// path, the dimensions and the numbers of each.
pub fn seeded<M: Module>(
    module: M,
    storage: Storage,
    adjust: impl Fn(&str, &[usize], &mut [f64]),
) -> M {
    module.map(&mut Seeding { path: Vec::new(), count: 0, storage, adjust })
}

struct Seeding<F> {
    path: Vec<String>,
    count: u64,
    storage: Storage,
    adjust: F,
}

impl<F: Fn(&str, &[usize], &mut [f64])> ModuleMapper for Seeding<F> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.count += 1;
        let path = self.path.join(".");
        let dims: [usize; D] = param.val().dims();
        let elements = dims.iter().product();
        let is_factor = path.ends_with("gamma");
        let deviation = match D {
            1 if is_factor => 0.1,
            1 => 0.3,
            _ => 1.0 / (dims[0] as f64).sqrt(),
        };
        let mut numbers = normal(100 + self.count, elements, deviation, self.storage);
        if is_factor {
            numbers.iter_mut().for_each(|number| *number = self.storage.round(*number + 1.0));
        }
        (self.adjust)(&path, &dims, &mut numbers);
        let storage = self.storage;
        param.map(|old| tensor(&numbers, dims, storage, &old.device()).require_grad())
    }
}

/// The same numbers in f64 on the CPU, for the formula as it is.
///
/// # Errors
///
/// What the device reports.
pub fn widened<M: Module>(module: &M) -> Result<M, Failed> {
    let fresh = module.clone().fork(&Device::flex().autodiff());
    Ok(with_parameters(fresh, &parameters(module)?))
}

/// `module`, which is on the CPU, with these parameters in f64.
pub fn with_parameters<M: Module>(module: M, parameters: &Tensors) -> M {
    struct Filling<'a>(std::slice::Iter<'a, (String, Vec<f64>)>);
    impl ModuleMapper for Filling<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let (_, numbers) = self.0.next().expect("both modules have the same parameters");
            param.map(|old| {
                let (dims, device): ([usize; D], _) = (old.dims(), old.device());
                wide(numbers, dims, &device).cast(FloatDType::F64).require_grad()
            })
        }
    }
    module.map(&mut Filling(parameters.iter()))
}

/// The parameters that `module` computes with, by their paths.
///
/// # Errors
///
/// What the device reports.
pub fn parameters<M: Module>(module: &M) -> Result<Tensors, Failed> {
    let mut visitor = Visitor::new(None);
    module.visit(&mut visitor);
    read(visitor.found?)
}

/// Tokens, and the gradient of what a module makes of them.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[batch, tokens, width]`
    pub shape: [usize; 3],
    /// In the order of the dimensions.
    pub x: Vec<f64>,
    /// As `x`.
    pub dy: Vec<f64>,
}

impl Tokens {
    /// Normal numbers of that deviation, and of 1 for the gradient.
    pub fn new(shape: [usize; 3], deviation: f64, storage: Storage) -> Self {
        let elements = shape.iter().product();
        let x = normal(1, elements, deviation, storage);
        Self { shape, x, dy: normal(2, elements, 1.0, storage) }
    }

    /// The same tokens with another gradient, of the same size; draw 0 is this one.
    #[must_use]
    pub fn drawn(&self, draw: u64, storage: Storage) -> Self {
        /// What no parameter is drawn from.
        const SEEDS: u64 = 1 << 32;
        match draw {
            0 => self.clone(),
            _ => Self { dy: normal(SEEDS + draw, self.dy.len(), 1.0, storage), ..self.clone() },
        }
    }

    /// The same tokens, of which those of the last sequence have no gradient: a fault that every gradient shows.
    #[must_use]
    pub fn without_last_sequence(&self) -> Self {
        let [batch, seq, width] = self.shape;
        let mut tokens = self.clone();
        tokens.dy[(batch - 1) * seq * width..].fill(0.0);
        tokens
    }

    /// The tokens as a tensor.
    pub fn tensor(&self, dtype: FloatDType, device: &Device) -> Tensor<3> {
        wide(&self.x, self.shape, device).cast(dtype)
    }

    /// What `forward` gives, the gradient of the tokens, and those of all parameters of `module`, by
    /// their paths.
    ///
    /// # Errors
    ///
    /// What the device reports, or a gradient that is not there.
    pub fn results<M: Module>(
        &self,
        module: &M,
        dtype: FloatDType,
        device: &Device,
        forward: impl FnOnce(&M, Tensor<3>) -> Tensor<3>,
    ) -> Result<Tensors, Failed> {
        let x = self.tensor(dtype, device).require_grad();
        let y = forward(module, x.clone());
        let dy = wide(&self.dy, self.shape, device).cast(dtype);
        let gradients = (y.clone() * dy).sum().backward();
        let dx = x.grad(&gradients).ok_or("the tokens have no gradient")?;
        let gradients = GradientsParams::from_grads(gradients, module);
        let mut results = vec![("output".into(), values(y)?), ("tokens".into(), values(dx)?)];
        results.extend(read(parameter_gradients(module, &gradients)?)?);
        Ok(results)
    }
}

/// Numbers of a storage type, which f32 holds as they are.
fn wide<const D: usize>(numbers: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor(numbers, shape, Storage::F32, device)
}

/// Tensors of any rank that are still on their device, by name.
pub type Unread = Vec<(String, Box<dyn FnOnce() -> Result<Vec<f64>, Failed>>)>;

/// The numbers in them.
///
/// # Errors
///
/// What the device reports.
pub fn read(tensors: Unread) -> Result<Tensors, Failed> {
    tensors.into_iter().map(|(name, read)| Ok((name, read()?))).collect()
}

/// The gradients of all parameters, by their paths. An optimizer may take them, too.
///
/// # Errors
///
/// A parameter without.
pub fn parameter_gradients<M: Module>(
    module: &M,
    gradients: &GradientsParams,
) -> Result<Unread, Failed> {
    let mut visitor = Visitor::new(Some(gradients));
    module.visit(&mut visitor);
    visitor.found
}

/// Reads gradients, or parameters where it has none.
struct Visitor<'a> {
    path: Vec<String>,
    gradients: Option<&'a GradientsParams>,
    found: Result<Unread, Failed>,
}

impl<'a> Visitor<'a> {
    fn new(gradients: Option<&'a GradientsParams>) -> Self {
        Self { path: Vec::new(), gradients, found: Ok(Vec::new()) }
    }
}

impl ModuleVisitor for Visitor<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Ok(found) = &mut self.found else { return };
        // Running statistics have no gradients.
        if self.gradients.is_some() && !param.is_require_grad() {
            return;
        }
        let path = self.path.join(".");
        let tensor = match self.gradients {
            Some(gradients) => gradients.get::<D>(param.id),
            None => Some(param.val()),
        };
        let tensor = tensor.ok_or_else(|| Failed::from(format!("{path} has no gradient")));
        match tensor {
            Ok(tensor) => found.push((path, Box::new(move || values(tensor)))),
            Err(error) => self.found = Err(error),
        }
    }
}

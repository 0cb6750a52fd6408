//! What the parameters of a module are called, and what they belong to.

use crate::path::ModulePath;
use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{DType, Tensor},
};

/// A parameter in floating point, or a running statistic.
#[derive(Clone, Debug)]
pub(super) struct FloatParameter {
    pub(super) id: ParamId,
    /// Such as `blocks.layers.0.mha.query.weight`.
    pub(super) path: String,
    /// Types of the modules around it, outermost first.
    pub(super) types: Vec<String>,
    pub(super) elements: usize,
    pub(super) dtype: DType,
    /// The name of what its value is made by, if it is not the value itself.
    pub(super) reparameterization: Option<String>,
}

impl FloatParameter {
    /// Path of the module that it belongs to; empty for the outermost.
    pub(super) fn layer(&self) -> &str {
        self.path.rsplit_once('.').map_or("", |(layer, _)| layer)
    }

    /// Type of that module.
    pub(super) fn layer_type(&self) -> &str {
        self.types.last().map_or("", String::as_str)
    }

    /// Whether it is the matrix of a `burn::nn::Linear`.
    pub(super) fn is_weight_of_linear(&self) -> bool {
        self.layer_type() == "Linear" && self.path.rsplit('.').next() == Some("weight")
    }
}

/// All of them, in the order of a visit.
pub(super) fn float_parameters<M: Module>(module: &M) -> Vec<FloatParameter> {
    let mut collector = Collector::default();
    module.visit(&mut collector);
    collector.found
}

#[derive(Default)]
struct Collector {
    path: ModulePath,
    types: Vec<String>,
    /// Depth of the reparameterization that is visited: its own parameters belong to the base.
    within: usize,
    found: Vec<FloatParameter>,
}

/// What Burn calls the container of a reparameterization's parameters.
const REPARAMETERIZATION: &str = "Reparameterization";

impl ModuleVisitor for Collector {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == REPARAMETERIZATION {
            if let Some(base) = self.found.last_mut() {
                base.reparameterization = Some(name.to_string());
            }
            self.within += 1;
        }
        self.path.enter(name);
        self.types.push(container_type.to_string());
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        if container_type == REPARAMETERIZATION {
            self.within -= 1;
        }
        self.path.exit();
        self.types.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.within > 0 {
            return;
        }
        // `Struct:Linear` is what a derived module says of itself; containers have a bare name.
        let types = self.types.iter().filter_map(|name| name.split_once(':'));
        self.found.push(FloatParameter {
            id: param.id,
            path: self.path.name(),
            types: types.map(|(_, name)| name.to_string()).collect(),
            elements: param.shape().num_elements(),
            dtype: param.base().dtype(),
            reparameterization: None,
        });
    }
}

//! What a recording takes for granted of a model: everything but the numbers of its parameters.

use super::state::{State, shared_values};
use crate::path::ModulePath;
use blackburn_backend::graph::Identity;
use burn::{
    module::{
        DisplaySettings, Flag, Module, ModuleDisplay, ModuleVisitor, Param, ParamId, ParameterValue,
    },
    tensor::{Bool, DType, GradientCheckpointingStrategy, Int, Tensor, kind},
};
use std::{any::Any, collections::HashSet, ptr};

/// A model without the numbers of its parameters.
#[derive(Debug)]
pub(super) struct Outline {
    description: String,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    path: String,
    id: ParamId,
    what: What,
}

#[derive(Debug)]
enum What {
    /// Its numbers are copied to the recording's memory before each pass.
    Parameter(Traits),
    /// What passes write. The same goes for it, but not what autodiff knows of it.
    State(Vec<usize>, DType),
    /// Its memory is read where it is.
    Shared(Shared),
    Flag(bool),
}

#[derive(Debug, PartialEq)]
struct Traits {
    dims: Vec<usize>,
    dtype: DType,
    is_trained: bool,
    checkpointing: Option<GradientCheckpointingStrategy>,
}

impl Traits {
    fn of<const D: usize>(param: &Param<Tensor<D>>) -> Self {
        Self {
            dims: param.dims().to_vec(),
            dtype: param.dtype(),
            is_trained: param.is_require_grad(),
            checkpointing: param.gradient_checkpointing_strategy(),
        }
    }
}

/// A tensor that is as long the same as its parameter is, or else its value.
#[derive(Debug)]
struct Shared {
    place: usize,
    identity: Option<Identity>,
    /// A parameter made later has another place as long as this one is there, and its memory is kept.
    _param: Box<dyn Any + Send>,
}

impl Shared {
    fn of<const D: usize, K: kind::Autodiff + 'static>(param: &Param<Tensor<D, K>>) -> Self
    where
        Tensor<D, K>: ParameterValue,
    {
        let identity = Identity::of(param.base());
        Self { place: place(param), identity, _param: Box::new(param.clone()) }
    }

    fn is<const D: usize, K: kind::Autodiff>(&self, param: &Param<Tensor<D, K>>) -> bool
    where
        Tensor<D, K>: ParameterValue,
    {
        self.place == place(param)
            || self.identity.is_some_and(|identity| Identity::of(param.base()) == Some(identity))
    }
}

/// Where a parameter keeps its tensor, which clones share. It can be compared from any thread, as opposed to
/// the tensor's identity.
fn place<T: ParameterValue>(param: &Param<T>) -> usize {
    ptr::from_ref::<T>(param).addr()
}

impl Outline {
    /// Of a model whose passes write `state`.
    pub(super) fn of<M: Module + ModuleDisplay>(model: &M, state: &State) -> Self {
        let shared = shared_values(model);
        let mut author = Author { state, shared, path: ModulePath::default(), parts: Vec::new() };
        model.visit(&mut author);
        Self { description: description(model), parts: author.parts }
    }

    /// What of `model` is different, by name.
    pub(super) fn change<M: Module + ModuleDisplay>(&self, model: &M) -> Option<String> {
        let mut reader = Reader { parts: self.parts.iter(), change: None };
        model.visit(&mut reader);
        let Reader { mut parts, change } = reader;
        let change = change.or_else(|| parts.next().map(|part| format!("`{}`", part.path)));
        change.or_else(|| {
            (self.description != description(model)).then(|| "its description".to_string())
        })
    }
}

/// All fields, those without parameters too.
fn description<M: ModuleDisplay>(model: &M) -> String {
    let settings = DisplaySettings::new()
        .with_show_all_attributes(true)
        .with_show_num_parameters(false)
        .with_new_line_after_attribute(false);
    model.format(settings)
}

struct Author<'a> {
    state: &'a State,
    shared: HashSet<ParamId>,
    path: ModulePath,
    parts: Vec<Part>,
}

impl Author<'_> {
    fn write(&mut self, id: ParamId, what: What) {
        self.parts.push(Part { path: self.path.name(), id, what });
    }
}

impl ModuleVisitor for Author<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let what = if self.state.contains(param.id) {
            What::State(param.dims().to_vec(), param.dtype())
        } else if self.shared.contains(&param.id) {
            What::Shared(Shared::of(param))
        } else {
            What::Parameter(Traits::of(param))
        };
        self.write(param.id, what);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.write(param.id, What::Shared(Shared::of(param)));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.write(param.id, What::Shared(Shared::of(param)));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.write(flag.id, What::Flag(flag.is_enabled()));
    }
}

/// Reads along in an outline, until the model differs.
struct Reader<'a> {
    parts: std::slice::Iter<'a, Part>,
    change: Option<String>,
}

impl Reader<'_> {
    fn read(&mut self, id: ParamId, is_same: impl FnOnce(&What) -> bool) {
        if self.change.is_some() {
            return;
        }
        self.change = match self.parts.next() {
            Some(part) if part.id == id && is_same(&part.what) => None,
            Some(part) => Some(format!("`{}`", part.path)),
            None => Some("its parameters".to_string()),
        };
    }
}

impl ModuleVisitor for Reader<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.read(param.id, |what| match what {
            What::Parameter(traits) => *traits == Traits::of(param),
            What::State(dims, dtype) => *dims == param.dims() && *dtype == param.dtype(),
            What::Shared(shared) => shared.is(param),
            What::Flag(_) => false,
        });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.read(param.id, |what| matches!(what, What::Shared(shared) if shared.is(param)));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.read(param.id, |what| matches!(what, What::Shared(shared) if shared.is(param)));
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.read(flag.id, |what| matches!(what, What::Flag(old) if *old == flag.is_enabled()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::{
        nn::{Dropout, DropoutConfig, Linear, LinearConfig},
        tensor::Device,
    };

    #[derive(Module, Debug)]
    struct Model {
        linear: Linear,
        mask: Param<Tensor<1, Bool>>,
        dropout: Dropout,
        factor: f64,
        #[module(skip)]
        name: &'static str,
    }

    fn mask(is_kept: bool) -> Tensor<1, Bool> {
        Tensor::from_data([is_kept, true], &Device::flex())
    }

    fn outline<M: Module + ModuleDisplay>(model: &M) -> Outline {
        Outline::of(model, &State::default())
    }

    fn model() -> Model {
        let device = Device::flex().autodiff();
        Model {
            linear: LinearConfig::new(2, 2).init(&device),
            mask: Param::initialized(ParamId::new(), mask(true)),
            dropout: DropoutConfig::new(0.0).init(),
            factor: 1.0,
            name: "one",
        }
    }

    #[test]
    fn numbers_of_parameters_are_no_change() {
        let mut model = model();
        let outline = outline(&model);
        model.linear.weight = model.linear.weight.map(|old| (old * 2.0).detach().require_grad());
        assert_eq!(outline.change(&model), None);
    }

    #[test]
    fn everything_else_is_a_change_and_is_named() {
        let model = model();
        let outline = outline(&model);
        let changed = |change: &dyn Fn(Model) -> Model| {
            outline.change(&change(model.clone())).expect("it was changed")
        };
        let frozen = changed(&|model| Model { linear: model.linear.no_grad(), ..model });
        assert_eq!(frozen, "`linear.weight`");
        let larger = LinearConfig::new(2, 3).init(&Device::flex().autodiff());
        let other = changed(&|model| Model { linear: larger.clone(), ..model });
        assert_eq!(other, "`linear.weight`");
        let masked = changed(&|model| {
            let id = model.mask.id;
            Model { mask: Param::initialized(id, mask(false)), ..model }
        });
        assert_eq!(masked, "`mask`");
        let flag = changed(&|model| Model { dropout: model.dropout.freeze(), ..model });
        assert_eq!(flag, "`dropout.training`");
        let field = changed(&|model| Model { factor: 2.0, ..model });
        assert_eq!(field, "its description");
        let skipped = changed(&|model| Model { name: "two", ..model });
        assert_eq!(skipped, "its description");
    }

    #[test]
    fn a_layer_more_or_less_is_a_change() {
        let linear = || LinearConfig::new(2, 2).init(&Device::flex());
        let (one, two) = (vec![linear()], vec![linear(), linear()]);
        let both = vec![one[0].clone(), two[1].clone()];
        assert_eq!(outline(&both).change(&one), Some("`1.weight`".to_string()));
        assert_eq!(outline(&one).change(&both), Some("its parameters".to_string()));
    }
}

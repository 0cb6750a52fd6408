//! Which fusion optimizations run: Burn's own and Blackburn's, and those switched off.

use crate::{
    fused::{
        attention::Attention,
        batch_norm::{BatchNormPass, BatchNormSearch, BehindArithmetic},
        burns,
        casts::{CastSearch, Casts},
        cat::Joint,
        channel_sum::ChannelSum,
        channels::ByChannel,
        column_sum::Sum,
        conv::Convolution,
        copy::Copied,
        embedding::{EmbeddingGradient, EmbeddingSearch},
        gelu::{GeluPass, GeluSearch},
        group_norm::{GroupNormPass, GroupNormSearch},
        interpolate::InterpolateGradient,
        layer_norm::{LayerNormPass, LayerNormSearch},
        loss_gradient::{LossGradient, LossGradientSearch},
        matmul::{self, MatmulSearch, MatmulSettings, ProductSettings},
        overwrite::{OverwriteSearch, Overwrites},
        pool::Pool,
        random::Random,
        reduce::Reduction,
        row_sum::RowSum,
        scan::Scan,
        scatter::{Scatter, ScatterSearch},
        slice_gradient::{SliceGradient, SliceGradientSearch},
        softmax::{SoftmaxPass, SoftmaxSearch},
        top_k::Largest,
    },
    interpolate,
    ops::{attention, fp8_linear},
    steps::{
        adamw::{Adamw, PlainSearch, PlainSteps},
        provider::{Optimizer, StepSearch},
        sgd::Sgd,
    },
    stream::{Replacement, SingleSearch, register},
};
pub use blackburn_kernels::matmul::F32Precision;
use burn_cubecl::fusion::{self, RegistryError};
use serde::Serialize;
use std::{collections::BTreeSet, fmt};

/// What became of one fusion provider at start-up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProviderStatus {
    /// The provider's name, which is what [`install`] takes to switch it off.
    pub name: String,
    /// Whose it is.
    pub origin: Origin,
    /// Whether it runs.
    pub state: ProviderState,
}

/// Who wrote a fusion provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// One of Burn's built-in optimizations.
    Burn,
    /// One of Blackburn's.
    Blackburn,
}

/// Whether a fusion provider runs, and why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state", content = "reason")]
pub enum ProviderState {
    /// It competes for every stretch of operations.
    Registered,
    /// The caller switched it off.
    Disabled,
    /// It is right, and whether it is faster was not measured yet: it is off unless the caller switches it on.
    Unmeasured,
    /// One of Blackburn's takes all that it would, and it was switched off: while Burn's `Matmul` waits for what follows
    /// a product, Burn goes on collecting operations, and cuts off others that are under way.
    Superseded,
    /// It could not be registered or switched off, for the reason given.
    Declined(String),
}

impl fmt::Display for ProviderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered => f.write_str("registered"),
            Self::Disabled => f.write_str("disabled"),
            Self::Unmeasured => {
                f.write_str("off until its gain is measured; BLACKBURN_ENABLE=NAME switches it on")
            }
            Self::Superseded => f.write_str("superseded by Blackburn's"),
            Self::Declined(reason) => write!(f, "declined: {reason}"),
        }
    }
}

/// A name to switch on or off that no provider has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no fusion provider is named `{name}`; the providers are {}", known.join(", "))]
pub struct UnknownProvider {
    /// The name that was given.
    pub name: String,
    /// The names there are.
    pub known: Vec<String>,
}

/// How Blackburn's providers are set up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProviderSettings {
    /// Names of providers that are switched off, Burn's or Blackburn's, in any case.
    pub disabled: BTreeSet<String>,
    /// Names of providers that are off by themselves and are switched on, in any case.
    pub enabled: BTreeSet<String>,
    /// With what precision matrix products of f32 tensors are computed.
    pub f32_matmul: F32Precision,
    /// Whether the plan of a matrix product is measured among the few that are expected to be
    /// fastest, or is the one that is expected to be.
    pub tune_matmul: bool,
    /// Whether the same input has to give the same bits each time.
    pub deterministic: bool,
}

/// Blackburn's providers: a name, and how it is registered.
const OURS: [(&str, Register); 30] = [
    (BehindArithmetic::NAME, |_| BehindArithmetic::register()),
    (Adamw::NAME, |_| register(StepSearch::<Adamw, 4>::default())),
    (Attention::NAME, |_| register(SingleSearch::<Attention>::default())),
    (BatchNormPass::NAME, |settings| {
        let convolutions = !settings.is_disabled(Convolution::NAME);
        let channels = !settings.is_disabled(ByChannel::NAME);
        register(BatchNormSearch::new(convolutions.then_some(settings.f32_matmul), channels))
    }),
    (Casts::NAME, |_| register(CastSearch::default())),
    (Joint::NAME, |_| register(SingleSearch::<Joint>::default())),
    (ByChannel::NAME, |_| register(SingleSearch::<ByChannel>::default())),
    (ChannelSum::NAME, |_| register(SingleSearch::<ChannelSum>::default())),
    (Sum::NAME, |_| register(SingleSearch::<Sum>::default())),
    (Convolution::NAME, |settings| register(SingleSearch::<Convolution>::new(settings.f32_matmul))),
    (Copied::NAME, |_| register(SingleSearch::<Copied>::default())),
    (EmbeddingGradient::NAME, |_| register(EmbeddingSearch::default())),
    (GeluPass::NAME, |settings| {
        let [no_sums, burn_draws] =
            [Sum::NAME, Random::NAME].map(|name| settings.is_disabled(name));
        register(GeluSearch::new(!no_sums, burn_draws))
    }),
    (GroupNormPass::NAME, |_| register(GroupNormSearch::default())),
    (InterpolateGradient::NAME, |_| {
        register(SingleSearch::<InterpolateGradient>::default())?;
        interpolate::set_registered();
        Ok(())
    }),
    (LayerNormPass::NAME, |_| register(LayerNormSearch::default())),
    (LossGradient::NAME, |_| register(LossGradientSearch::default())),
    (matmul::NAME, register_matmul),
    (Overwrites::NAME, |_| register(OverwriteSearch::default())),
    (PlainSteps::NAME, |_| register(PlainSearch::default())),
    (Pool::NAME, |_| register(SingleSearch::<Pool>::default())),
    (Random::NAME, |_| register(SingleSearch::<Random>::default())),
    (Reduction::NAME, |_| register(SingleSearch::<Reduction>::default())),
    (RowSum::NAME, |_| register(SingleSearch::<RowSum>::default())),
    (Scan::NAME, |_| register(SingleSearch::<Scan>::default())),
    (Scatter::NAME, |_| register(ScatterSearch::default())),
    (Sgd::NAME, |_| register(StepSearch::<Sgd, 3>::default())),
    (SliceGradient::NAME, |_| register(SliceGradientSearch::default())),
    (SoftmaxPass::NAME, |settings| {
        register(SoftmaxSearch::new(settings.is_disabled(Random::NAME)))
    }),
    (Largest::NAME, |_| register(SingleSearch::<Largest>::default())),
];

/// Those whose gain was not measured on a GPU yet.
const UNMEASURED: [&str; 0] = [];

/// Burn's fusions that are switched off where one of ours is on, and that one.
///
/// `Reduce` and `ReduceBroadcasted` are not among them. Without Burn's autotuner, the latter runs element-wise operations
/// and reductions one after the other, and saves nothing, and the former gives each output one unit. By themselves, on an
/// H100, `var` and `log_softmax` along the first of 16384 by 1024 take 0.2 ms without them instead of 8 to 11. But whole
/// models gain nothing, and a vision transformer of unmodified modules takes 93.5 instead of 56.9 ms a step.
const SUPERSEDED: [(&str, &str); 1] = [("Matmul", matmul::NAME)];

type Register = fn(&ProviderSettings) -> Result<(), RegistryError>;

fn register_matmul(settings: &ProviderSettings) -> Result<(), RegistryError> {
    let product = ProductSettings {
        full_f32: settings.f32_matmul == F32Precision::Full,
        tune: settings.tune_matmul,
    };
    register(MatmulSearch::new(MatmulSettings {
        product,
        takes_gelu: !settings.is_disabled(GeluPass::NAME),
        takes_sum: !settings.is_disabled(Sum::NAME),
    }))?;
    // Its products look at marks.
    fp8_linear::set_served();
    Ok(())
}

impl ProviderSettings {
    fn is_disabled(&self, name: &str) -> bool {
        self.disabled.iter().any(|other| is_named(other, name))
    }

    fn is_superseded(&self, name: &str) -> bool {
        let by = |ours: &str| !self.is_disabled(ours) && !self.is_left_off(ours);
        SUPERSEDED.iter().any(|(burns, ours)| is_named(name, burns) && by(ours))
    }

    fn is_left_off(&self, name: &str) -> bool {
        UNMEASURED.contains(&name) && !self.enabled.iter().any(|other| is_named(other, name))
    }
}

/// The names of all providers: Burn's, then Blackburn's.
pub fn names() -> Vec<String> {
    let ours = OURS.iter().map(|(name, _)| name);
    fusion::BUILTIN_NAMES.iter().chain(ours).map(ToString::to_string).collect()
}

/// Registers Blackburn's providers, switches off those that are disabled, and reports on all.
///
/// Call it before the first tensor operation: once Burn's fusion service runs, its registry is
/// sealed, and what could not be registered or switched off is reported as
/// [`ProviderState::Declined`].
///
/// # Errors
///
/// [`UnknownProvider`] when a name that is switched on or off is none of [`names`]; nothing is changed then.
pub fn install(settings: &ProviderSettings) -> Result<Vec<ProviderStatus>, UnknownProvider> {
    let known = names();
    let mut named = settings.disabled.iter().chain(&settings.enabled);
    if let Some(name) = named.find(|name| !known.iter().any(|k| is_named(name, k))) {
        return Err(UnknownProvider { name: name.clone(), known });
    }
    attention::cube::set_up(settings.deterministic, settings.f32_matmul == F32Precision::Full);
    let burns = fusion::BUILTIN_NAMES.iter().map(|name| {
        let state = if settings.is_disabled(name) {
            settle(fusion::remove(name), ProviderState::Disabled)
        } else if settings.is_superseded(name) {
            settle(fusion::remove(name), ProviderState::Superseded)
        } else {
            let reduces = !settings.is_disabled(Reduction::NAME);
            settle(burns::register(name, reduces), ProviderState::Registered)
        };
        ProviderStatus { name: name.to_string(), origin: Origin::Burn, state }
    });
    let ours = OURS.iter().map(|(name, register)| {
        let state = if settings.is_disabled(name) {
            ProviderState::Disabled
        } else if settings.is_left_off(name) {
            ProviderState::Unmeasured
        } else {
            settle(register(settings), ProviderState::Registered)
        };
        ProviderStatus { name: name.to_string(), origin: Origin::Blackburn, state }
    });
    Ok(burns.chain(ours).collect())
}

fn is_named(name: &str, candidate: &str) -> bool {
    name.eq_ignore_ascii_case(candidate)
}

fn settle(result: Result<(), RegistryError>, done: ProviderState) -> ProviderState {
    match result {
        Ok(()) => done,
        Err(error) => ProviderState::Declined(describe(&error)),
    }
}

fn describe(error: &RegistryError) -> String {
    match error {
        RegistryError::ServiceRunning => {
            "tensors were used before blackburn::init(), and Burn seals its registry at the first \
             tensor operation; call blackburn::init() first"
                .into()
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(names: &[&str]) -> ProviderSettings {
        let disabled = names.iter().map(ToString::to_string).collect();
        ProviderSettings { disabled, ..ProviderSettings::default() }
    }

    #[test]
    fn a_name_that_no_provider_has_is_refused_with_the_names_there_are() {
        let error = install(&without(&["warp-drive"])).unwrap_err();
        assert_eq!(error.name, "warp-drive");
        assert!(error.to_string().contains("Matmul"), "{error}");
    }

    #[test]
    fn a_provider_is_switched_off_whatever_the_case_of_its_name() {
        let statuses = install(&without(&["nhwcrelayout", "BLACKBURNMATMUL"])).unwrap();
        let of = |name: &str| &statuses.iter().find(|s| s.name == name).unwrap().state;
        assert_eq!(of("NHWCRelayout"), &ProviderState::Disabled);
        assert_eq!(of("BlackburnMatmul"), &ProviderState::Disabled);
        assert_eq!(of("ElementWise"), &ProviderState::Registered);
        assert_eq!(of("BlackburnColumnSum"), &ProviderState::Registered);
    }
}

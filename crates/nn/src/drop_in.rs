//! How a module of this crate stands in for one of `burn::nn` of the same name.
//!
//! It holds Burn's module and hands everything on to it but what it does better. So records, displays, paths of
//! parameters and what policies and optimizers see are Burn's own. Fields and other methods are reached by
//! `Deref`, and the functions of this crate take either.

/// Declares `$name`, which holds `$burn`.
macro_rules! drop_in {
    ($(#[$doc:meta])* $name:ident, $burn:ty) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name($burn);

        impl From<$burn> for $name {
            fn from(module: $burn) -> Self {
                Self(module)
            }
        }

        impl From<$name> for $burn {
            fn from(module: $name) -> Self {
                module.0
            }
        }

        impl std::ops::Deref for $name {
            type Target = $burn;

            fn deref(&self) -> &$burn {
                &self.0
            }
        }

        impl std::ops::DerefMut for $name {
            fn deref_mut(&mut self) -> &mut $burn {
                &mut self.0
            }
        }

        impl burn::module::Module for $name {
            fn collect_devices(&self, devices: burn::module::Devices) -> burn::module::Devices {
                burn::module::Module::collect_devices(&self.0, devices)
            }

            fn fork(self, device: &burn::tensor::Device) -> Self {
                Self(burn::module::Module::fork(self.0, device))
            }

            fn to_device(self, device: &burn::tensor::Device) -> Self {
                Self(burn::module::Module::to_device(self.0, device))
            }

            fn train(self) -> Self {
                Self(burn::module::Module::train(self.0))
            }

            fn valid(&self) -> Self {
                Self(burn::module::Module::valid(&self.0))
            }

            fn materialize(self) -> Self {
                Self(burn::module::Module::materialize(self.0))
            }

            fn num_params(&self) -> usize {
                burn::module::Module::num_params(&self.0)
            }

            fn visit<V: burn::module::ModuleVisitor>(&self, visitor: &mut V) {
                let name = stringify!($name);
                visitor.enter_module(name, blackburn_backend::drop_in::CONTAINER);
                visitor.exit_module(name, blackburn_backend::drop_in::CONTAINER);
                burn::module::Module::visit(&self.0, visitor);
            }

            fn map<M: burn::module::ModuleMapper>(self, mapper: &mut M) -> Self {
                Self(burn::module::Module::map(self.0, mapper))
            }
        }

        impl burn::module::ModuleDisplayDefault for $name {
            fn content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                burn::module::ModuleDisplayDefault::content(&self.0, content)
            }

            fn num_params(&self) -> usize {
                burn::module::ModuleDisplayDefault::num_params(&self.0)
            }
        }

        impl burn::module::ModuleDisplay for $name {
            fn custom_settings(&self) -> Option<burn::module::DisplaySettings> {
                burn::module::ModuleDisplay::custom_settings(&self.0)
            }

            fn custom_content(
                &self,
                content: burn::module::Content,
            ) -> Option<burn::module::Content> {
                burn::module::ModuleDisplay::custom_content(&self.0, content)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

/// Converts between a configuration and that of Burn, `$burn`, which has the same `$field`s.
macro_rules! same_config {
    ($name:ident, $burn:ty, $($field:ident),+) => {
        impl From<$burn> for $name {
            fn from(config: $burn) -> Self {
                Self { $($field: config.$field),+ }
            }
        }

        impl From<$name> for $burn {
            fn from(config: $name) -> Self {
                Self { $($field: config.$field),+ }
            }
        }
    };
}

pub(crate) use {drop_in, same_config};

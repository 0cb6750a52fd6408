//! The properties of a GPU that is not there, as CubeCL's CUDA runtime would fill them in.

use cubecl::{
    cmma::MatrixLayout,
    ir::{
        ComplexKind, ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind,
        HardwareProperties, MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties,
        Type, VectorSize,
        features::{AtomicUsage, ComplexUsage, Plane, Tma, TypeUsage},
    },
    profile::TimingMethod,
};
use cubecl_cpp::{
    cuda::{
        arch::CudaArchitecture,
        mma::{
            CudaCmmaCompiler,
            manual::{
                contiguous_elements_cuda, supported_mma_combinations,
                supported_scaled_mma_combinations,
            },
        },
    },
    register_supported_types,
    shared::{
        CompilationOptions, CppSupportedFeatures, register_mma_features,
        register_scaled_mma_features, register_wmma_features,
    },
};

/// A GPU, as far as kernels and their plans depend on it.
///
/// Its properties and compiler options repeat what `cubecl-cuda` makes of a device (`runtime.rs` there). A
/// test on GPUs compares the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// What NVRTC calls it.
    pub architecture: &'static str,
    /// Compute capability times ten.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a cube may opt in to, in bytes.
    pub shared_bytes: usize,
    /// Memory, in bytes.
    pub memory_bytes: u64,
}

impl Gpu {
    /// Ampere: A100.
    pub const SM_80: Self = Self::new("sm_80", 80, 108, 163, 80);
    /// Ada: L40S.
    pub const SM_89: Self = Self::new("sm_89", 89, 142, 99, 48);
    /// Hopper: H100 or H200.
    pub const SM_90A: Self = Self::new("sm_90a", 90, 132, 227, 80);
    /// Blackwell of data centers: B200.
    pub const SM_100A: Self = Self::new("sm_100a", 100, 148, 227, 180);
    /// Blackwell Ultra: B300.
    pub const SM_103A: Self = Self::new("sm_103a", 103, 148, 227, 268);
    /// Blackwell of workstations: RTX PRO 6000.
    pub const SM_120A: Self = Self::new("sm_120a", 120, 188, 99, 96);
    /// Blackwell of the desktop: GB10.
    pub const SM_121A: Self = Self::new("sm_121a", 121, 48, 99, 119);
    /// One of each architecture.
    pub const ALL: [Self; 7] = [
        Self::SM_80,
        Self::SM_89,
        Self::SM_90A,
        Self::SM_100A,
        Self::SM_103A,
        Self::SM_120A,
        Self::SM_121A,
    ];

    /// Shared memory in KiB, memory in GiB.
    const fn new(
        architecture: &'static str,
        capability: u32,
        multiprocessors: u32,
        shared_kib: usize,
        memory_gib: u64,
    ) -> Self {
        let (shared_bytes, memory_bytes) = (shared_kib << 10, memory_gib << 30);
        Self { architecture, capability, multiprocessors, shared_bytes, memory_bytes }
    }

    /// The properties of its clients.
    pub fn properties(&self) -> DeviceProperties {
        let arch = CudaArchitecture { version: self.capability, tensor_cores: true };
        let cmma = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch);
        let hardware = HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: self.shared_bytes,
            max_cube_count: (i32::MAX as u32, u16::MAX.into(), u16::MAX.into()),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(self.multiprocessors),
            // CubeCL has no number for later ones.
            num_tensor_cores: (self.capability <= 100).then_some(4),
            min_tensor_cores_dim: (!cmma.is_empty()).then_some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        };
        let mut properties = DeviceProperties::new(
            Default::default(),
            MemoryDeviceProperties::new(self.memory_bytes / 4, 512)
                .with_max_memory(self.memory_bytes),
            hardware,
            TimingMethod::Device,
            DeviceIdentity {
                name: self.architecture.into(),
                fingerprint: format!("ptx_sm{}", self.capability),
                physical: None,
            },
        );
        register_supported_types(&mut properties);
        self.register_types(&mut properties);
        self.register_features(&mut properties);
        register_wmma_features(cmma, &mut properties);
        register_mma_features(supported_mma_combinations(&arch), &mut properties);
        register_scaled_mma_features(supported_scaled_mma_combinations(&arch), &mut properties);
        properties
    }

    fn register_types(&self, properties: &mut DeviceProperties) {
        let float = ElemType::Float;
        let both = TypeUsage::Conversion | TypeUsage::Buffer;
        let moved = AtomicUsage::Add | AtomicUsage::LoadStore | AtomicUsage::Exchange;
        let atomic = |kind, vector| Type::atomic(Type::new(float(kind)).with_vector_size(vector));
        for kind in [ComplexKind::C32, ComplexKind::C64] {
            let complex = ElemType::Complex(kind);
            properties.register_type_usage(complex, both);
            properties.register_complex_usage(
                complex,
                ComplexUsage::Core | ComplexUsage::Compare | ComplexUsage::Math,
            );
        }
        properties.register_atomic_type_usage(Type::atomic(float(FloatKind::F64)), moved);
        properties
            .register_atomic_type_usage(Type::atomic(float(FloatKind::F16)), AtomicUsage::Add);
        properties.register_atomic_type_usage(atomic(FloatKind::F16, 2), moved);
        properties.register_opaque_type(OpaqueType::Barrier);
        properties.register_type_usage(float(FloatKind::TF32), TypeUsage::Conversion);
        if self.capability >= 90 {
            properties.register_opaque_type(OpaqueType::TensorMap);
            for kind in [FloatKind::BF16, FloatKind::F16] {
                for vector in [2, 4, 8] {
                    properties.register_atomic_type_usage(atomic(kind, vector), moved);
                }
                for vector in [4, 8] {
                    properties
                        .register_atomic_type_usage(atomic(kind, vector), AtomicUsage::MinMax);
                }
            }
            for vector in [2, 4] {
                properties.register_atomic_type_usage(atomic(FloatKind::F32, vector), moved);
            }
        }
        if self.is_blackwell() {
            properties.register_type_usage(float(FloatKind::E2M1), TypeUsage::Conversion);
            for kind in [FloatKind::E2M1x2, FloatKind::E2M3, FloatKind::E3M2, FloatKind::UE8M0] {
                properties.register_type_usage(float(kind), both);
            }
        }
    }

    /// Whether it has floats of four and six bits, which CubeCL does not expect of its successors.
    fn is_blackwell(&self) -> bool {
        matches!(self.capability / 10, 10..=12)
    }

    fn register_features(&self, properties: &mut DeviceProperties) {
        let halves = [FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
        let features = &mut properties.features;
        features.plane.insert(Plane::Sync);
        features.plane.insert(Plane::Ops);
        features.plane.insert(Plane::NonUniformControlFlow);
        features.matmul.ldmatrix.extend(halves);
        features.copy_async = true;
        features.memory_reinterpret = true;
        features.alignment = true;
        features.device_memory_scope = true;
        if self.capability >= 90 {
            features.tma.insert(Tma::Base);
            features.cube_cluster = true;
            features.matmul.stmatrix.extend(halves);
        }
        if self.capability >= 100 {
            features.tma.insert(Tma::Im2colWide);
        }
        if self.is_blackwell() {
            features.tma.insert(Tma::SwizzleAtomicity);
        }
    }
}

/// The options that CubeCL's compiler to CUDA C++ gets for a compute capability (times ten).
pub(super) fn options(capability: u32) -> CompilationOptions {
    CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            clusters: capability >= 90,
            fast_math: true,
            fast_tanh: true,
            elect_sync: capability >= 90,
            dp4a: true,
        },
        ..Default::default()
    }
}

/// How the operands of matrix instructions lie in registers.
pub(super) fn target_properties() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}

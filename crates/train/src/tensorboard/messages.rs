//! The protocol buffers of an event file: the fields that are written, with the tags of TensorFlow's
//! `event.proto`, `summary.proto` and `tensor.proto`.

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Event {
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub(super) what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SessionLog {
    // An enum in the schema, which has the same encoding.
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) values: Vec<Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
    // A oneof is written even where it holds the default: a loss of zero is not left out.
    #[prost(oneof = "Content", tags = "2, 4, 8")]
    pub(super) content: Option<Content>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum Content {
    #[prost(float, tag = "2")]
    SimpleValue(f32),
    #[prost(message, tag = "4")]
    Image(Image),
    #[prost(message, tag = "8")]
    Tensor(Tensor),
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Image {
    #[prost(int32, tag = "1")]
    pub(super) height: i32,
    #[prost(int32, tag = "2")]
    pub(super) width: i32,
    #[prost(int32, tag = "3")]
    pub(super) colorspace: i32,
    #[prost(bytes = "vec", tag = "4")]
    pub(super) encoded: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Tensor {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<()>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_values: Vec<Vec<u8>>,
}

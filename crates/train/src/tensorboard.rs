//! Event files that `TensorBoard` reads.
//!
//! An event file is a sequence of `TFRecord` frames, each holding one `Event` protocol buffer.
//! The messages are written by hand: they name the few fields that a writer of scalars, texts and images
//! needs, so that building needs neither `protoc` nor TensorFlow.
//!
//! ```
//! use blackburn_train::tensorboard::EventWriter;
//!
//! let run = tempfile::tempdir()?;
//! let mut events = EventWriter::create(run.path())?;
//! events.scalar("train/loss", 1, 10.8)?;
//! events.text("samples", 1, "Once upon a time")?;
//! events.flush()?;
//! assert!(events.path().starts_with(run.path()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod messages;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use messages::{
    Content, Event, Image, PluginData, SessionLog, Summary, SummaryMetadata, Tensor, Value, What,
};
use prost::Message;

/// The version `TensorBoard` looks for in the first record.
const FILE_VERSION: &str = "brain.Event:2";

/// Added to a rotated checksum by the `TFRecord` format, so that the checksum of data that itself
/// holds checksums stays useful.
const CRC_MASK_DELTA: u32 = 0xa282_ead8;

/// `DT_STRING` of TensorFlow's `DataType`.
const DT_STRING: i32 = 7;

/// Three channels, in TensorFlow's `Summary.Image`.
const RGB: i32 = 3;

/// `START` of TensorFlow's `SessionLog.SessionStatus`.
const SESSION_START: i32 = 1;

/// What can go wrong while writing an event file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// The operating system refused an operation on the file or its folder.
    #[error("event file {}: could not {operation}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb phrase.
        operation: &'static str,
        /// The file or folder concerned.
        path: PathBuf,
        /// The reason given by the operating system.
        source: io::Error,
    },
    /// An image without pixels, or with more than a file can tell.
    #[error(
        "event file: argument `size`: expected a width and a height from 1 to {}, got {width} x {height}",
        i32::MAX
    )]
    ImageSize {
        /// Pixels of a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Event files store steps as signed 64-bit integers.
    #[error("event file: step {step} is too large: expected at most {}", i64::MAX)]
    StepTooLarge {
        /// The step that was given.
        step: u64,
    },
}

/// Appends scalars, texts and images to one `TensorBoard` event file.
///
/// Records are buffered; [`flush`](Self::flush) hands them to the operating system, and so does
/// dropping the writer, though without a way to report an error.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    // Writes what it still holds when it is dropped.
    file: BufWriter<File>,
}

impl EventWriter {
    /// Creates `dir` if needed and, in it, a new file that begins with the version record.
    ///
    /// The file is named `events.out.tfevents.<unix seconds>.<hostname>.<pid>.blackburn`, with a
    /// counter appended where that name is taken. An existing file is never written to:
    /// `TensorBoard` reads all event files of a folder, in the order of their names, as one run.
    ///
    /// # Errors
    ///
    /// [`EventError::Io`] if the folder or the file cannot be created or written.
    pub fn create(dir: impl AsRef<Path>) -> Result<Self, EventError> {
        let dir = dir.as_ref();
        fs::create_dir_all(dir).map_err(|source| io_error("create the folder", dir, source))?;
        let (path, file) = create_new_file(dir)?;
        let mut writer = Self { path, file: BufWriter::new(file) };
        writer.append(0, What::FileVersion(FILE_VERSION.to_owned()))?;
        writer.flush()?;
        Ok(writer)
    }

    /// The file being written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends the value of `tag` at `step`. NaN and infinity are written as they are;
    /// `TensorBoard` marks them.
    ///
    /// # Errors
    ///
    /// [`EventError::StepTooLarge`] above `i64::MAX`, [`EventError::Io`] if writing fails.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f32) -> Result<(), EventError> {
        self.summary(step, tag, None, Content::SimpleValue(value))
    }

    /// Appends a text, which `TensorBoard`'s text tab renders as Markdown.
    ///
    /// # Errors
    ///
    /// [`EventError::StepTooLarge`] above `i64::MAX`, [`EventError::Io`] if writing fails.
    pub fn text(&mut self, tag: &str, step: u64, text: &str) -> Result<(), EventError> {
        let plugin_data = Some(PluginData { plugin_name: "text".to_owned() });
        let tensor = Tensor {
            dtype: DT_STRING,
            // Present and without dimensions: a scalar.
            shape: Some(()),
            string_values: vec![text.into()],
        };
        let metadata = Some(SummaryMetadata { plugin_data });
        self.summary(step, tag, metadata, Content::Tensor(tensor))
    }

    /// Appends an image in RGB, as an encoded file: the bytes of a PNG or a JPEG, of that many pixels. Neither
    /// are they decoded here nor the size compared with theirs.
    ///
    /// # Errors
    ///
    /// [`EventError::ImageSize`] unless width and height are from 1 to `i32::MAX`,
    /// [`EventError::StepTooLarge`] above `i64::MAX`, [`EventError::Io`] if writing fails.
    pub fn image(
        &mut self,
        tag: &str,
        step: u64,
        [width, height]: [u32; 2],
        encoded: &[u8],
    ) -> Result<(), EventError> {
        let pixels = |count: u32| i32::try_from(count).ok().filter(|count| *count > 0);
        let (Some(columns), Some(rows)) = (pixels(width), pixels(height)) else {
            return Err(EventError::ImageSize { width, height });
        };
        let image =
            Image { height: rows, width: columns, colorspace: RGB, encoded: encoded.to_vec() };
        self.summary(step, tag, None, Content::Image(image))
    }

    /// Tells `TensorBoard` to forget what earlier event files of the folder hold for `step` and
    /// later: a run that resumes from a checkpoint repeats those steps.
    ///
    /// # Errors
    ///
    /// [`EventError::StepTooLarge`] above `i64::MAX`, [`EventError::Io`] if writing fails.
    pub fn discard_from(&mut self, step: u64) -> Result<(), EventError> {
        let status = SESSION_START;
        self.append(step, What::SessionLog(SessionLog { status }))
    }

    /// Hands everything written so far to the operating system.
    ///
    /// # Errors
    ///
    /// [`EventError::Io`] if writing fails.
    pub fn flush(&mut self) -> Result<(), EventError> {
        self.file.flush().map_err(|source| io_error("flush", &self.path, source))
    }

    fn summary(
        &mut self,
        step: u64,
        tag: &str,
        metadata: Option<SummaryMetadata>,
        content: Content,
    ) -> Result<(), EventError> {
        let value = Value { tag: tag.to_owned(), metadata, content: Some(content) };
        let values = vec![value];
        self.append(step, What::Summary(Summary { values }))
    }

    fn append(&mut self, step: u64, what: What) -> Result<(), EventError> {
        let step = i64::try_from(step).map_err(|_| EventError::StepTooLarge { step })?;
        let event = Event { wall_time: now().as_secs_f64(), step, what: Some(what) };
        // One write a frame: the buffer then spills between frames, and a reader that follows the
        // file does not meet half a frame.
        let frame = frame(&event.encode_to_vec());
        self.file.write_all(&frame).map_err(|source| io_error("append", &self.path, source))
    }
}

fn io_error(operation: &'static str, path: &Path, source: io::Error) -> EventError {
    let path = path.to_owned();
    EventError::Io { operation, path, source }
}

fn create_new_file(dir: &Path) -> Result<(PathBuf, File), EventError> {
    let (seconds, host, pid) = (now().as_secs(), hostname(), std::process::id());
    let name = format!("events.out.tfevents.{seconds}.{host}.{pid}.blackburn");
    let mut path = dir.join(&name);
    let mut taken = 0;
    loop {
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                taken += 1;
                path = dir.join(format!("{name}.{taken}"));
            }
            Err(source) => return Err(io_error("create the file", &path, source)),
        }
    }
}

/// Time since 1970; zero before, which only spoils the "relative time" axis.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The machine's name where it can be had without a call into the C library; it only serves to
/// tell files of different machines apart.
fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(|| std::env::var("COMPUTERNAME").ok())
        .unwrap_or_default();
    let name: String =
        name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
    match name.as_str() {
        "" => "localhost".to_owned(),
        _ => name,
    }
}

/// `TFRecord` framing: length, checksum of the length, data, checksum of the data.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut frame = Vec::with_capacity(data.len() + 16);
    frame.extend(length);
    frame.extend(masked_crc(&length).to_le_bytes());
    frame.extend(data);
    frame.extend(masked_crc(data).to_le_bytes());
    frame
}

fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(CRC_MASK_DELTA)
}

/// The scalars of an event file: tag, step, value.
#[cfg(all(test, feature = "burn-train"))]
pub(crate) fn scalars(bytes: &[u8]) -> Vec<(String, i64, f32)> {
    let events = tests::parse(bytes).expect("an undamaged file");
    let summaries = events.into_iter().filter_map(|event| match event.what? {
        What::Summary(summary) => Some((event.step, summary.values)),
        _ => None,
    });
    summaries
        .flat_map(|(step, values)| values.into_iter().map(move |value| (step, value)))
        .filter_map(|(step, value)| match value.content? {
            Content::SimpleValue(scalar) => Some((value.tag, step, scalar)),
            Content::Image(_) | Content::Tensor(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Undoes the framing with a second reading of its description; says what is wrong.
    pub(super) fn parse(mut bytes: &[u8]) -> Result<Vec<Event>, String> {
        fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
            let (head, tail) = bytes.split_at_checked(count).ok_or("the file ends early")?;
            *bytes = tail;
            Ok(head)
        }
        fn check(data: &[u8], stored: &[u8], what: &str) -> Result<(), String> {
            let crc = crc32c::crc32c(data);
            let masked = crc.rotate_left(17).wrapping_add(0xa282_ead8);
            (stored == masked.to_le_bytes())
                .then_some(())
                .ok_or_else(|| format!("{what} is damaged"))
        }
        let mut events = Vec::new();
        while !bytes.is_empty() {
            let length = take(&mut bytes, 8)?;
            check(length, take(&mut bytes, 4)?, "a length")?;
            let length = u64::from_le_bytes(length.try_into().expect("8 bytes"));
            let data = take(&mut bytes, length as usize)?;
            check(data, take(&mut bytes, 4)?, "an event")?;
            events.push(Event::decode(data).map_err(|e| e.to_string())?);
        }
        Ok(events)
    }

    fn written(write: impl FnOnce(&mut EventWriter)) -> Vec<u8> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut writer = EventWriter::create(dir.path()).expect("create");
        write(&mut writer);
        let path = writer.path().to_owned();
        drop(writer);
        fs::read(path).expect("the file")
    }

    fn only_value(event: &Event) -> &Value {
        match &event.what {
            Some(What::Summary(summary)) if summary.values.len() == 1 => &summary.values[0],
            other => panic!("expected a summary of one value, got {other:?}"),
        }
    }

    #[test]
    fn tags_steps_and_values_round_trip_after_the_version_record() {
        let values = [(1, 10.825_f32), (1 << 40, 0.0), (2, f32::NAN), (7, f32::INFINITY)];
        let bytes = written(|writer| {
            for (step, value) in values {
                writer.scalar("train/loss", step, value).expect("scalar");
            }
        });
        let events = parse(&bytes).expect("an undamaged file");
        assert_eq!(events.len(), 1 + values.len());
        let version = What::FileVersion("brain.Event:2".to_owned());
        assert_eq!(events[0].what, Some(version));
        for (event, (step, value)) in events[1..].iter().zip(values) {
            assert_eq!(event.step, step as i64);
            assert!(event.wall_time > 1.6e9);
            assert_eq!(only_value(event).tag, "train/loss");
            let Some(Content::SimpleValue(read)) = only_value(event).content else {
                panic!("expected a scalar, got {event:?}");
            };
            assert_eq!(read.to_bits(), value.to_bits());
        }
    }

    #[test]
    fn text_is_a_string_tensor_of_the_text_plugin() {
        let bytes = written(|writer| writer.text("samples", 5, "Ein Märchen").expect("text"));
        let events = parse(&bytes).expect("an undamaged file");
        assert_eq!(events[1].step, 5);
        let value = only_value(&events[1]);
        let metadata = value.metadata.as_ref().expect("metadata");
        let plugin = metadata.plugin_data.as_ref().expect("plugin data");
        assert_eq!(plugin.plugin_name, "text");
        let Some(Content::Tensor(tensor)) = &value.content else {
            panic!("expected a tensor, got {value:?}");
        };
        assert_eq!(tensor.dtype, 7);
        assert_eq!(tensor.string_values, ["Ein Märchen".as_bytes()]);
    }

    /// Field 4 of a value, with height, width, color space and the file as fields 1 to 4.
    #[test]
    fn an_image_is_the_encoded_file_with_its_size() {
        let bytes = written(|writer| {
            writer.image("validation/samples", 9, [3, 200], b"PNG").expect("image");
            let error = writer.image("none", 9, [0, 7], b"PNG").expect_err("no pixels");
            assert!(error.to_string().contains("got 0 x 7"), "{error}");
        });
        let events = parse(&bytes).expect("an undamaged file");
        assert_eq!((events.len(), events[1].step), (2, 9));
        let value = only_value(&events[1]);
        assert_eq!(value.tag, "validation/samples");
        let mut expected = b"\x0a\x12validation/samples\x22\x0c".to_vec();
        expected.extend(b"\x08\xc8\x01\x10\x03\x18\x03\x22\x03PNG");
        assert_eq!(value.encode_to_vec(), expected);
    }

    #[test]
    fn a_resumed_run_announces_the_steps_it_will_repeat() {
        let bytes = written(|writer| writer.discard_from(31).expect("session start"));
        let events = parse(&bytes).expect("an undamaged file");
        assert_eq!(events[1].step, 31);
        let start = What::SessionLog(SessionLog { status: 1 });
        assert_eq!(events[1].what, Some(start));
    }

    #[test]
    fn any_flipped_byte_is_detected() {
        let bytes = written(|writer| writer.scalar("loss", 1, 2.5).expect("scalar"));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert!(parse(&damaged).is_err(), "byte {at} was flipped unnoticed");
        }
    }

    #[test]
    fn framing_agrees_with_known_vectors() {
        // RFC 3720, B.4: the CRC32C of 32 zero bytes is 0x8a9136aa, which masks to this.
        assert_eq!(masked_crc(&[0; 32]), 0x0fd7_fffa);
        // Every event file of TensorFlow begins so: its version record is 24 bytes long.
        let head = &written(|_| {})[..12];
        assert_eq!(head, b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22");
    }

    #[test]
    fn an_existing_file_is_never_overwritten() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut writers: Vec<_> =
            (0..3).map(|_| EventWriter::create(dir.path()).expect("create")).collect();
        for writer in &mut writers {
            writer.scalar("loss", 1, 1.0).expect("scalar");
            writer.flush().expect("flush");
        }
        assert_eq!(fs::read_dir(dir.path()).expect("the folder").count(), 3);
        for writer in &writers {
            let events = parse(&fs::read(writer.path()).expect("the file"));
            assert_eq!(events.expect("an undamaged file").len(), 2);
        }
    }

    #[test]
    fn errors_name_the_path_and_the_step() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let file = dir.path().join("not-a-folder");
        fs::write(&file, "").expect("a file");
        let error = EventWriter::create(&file).expect_err("a file is no folder");
        assert!(error.to_string().contains("not-a-folder"), "{error}");
        let mut writer = EventWriter::create(dir.path()).expect("create");
        let error = writer.scalar("loss", u64::MAX, 1.0).expect_err("too large");
        assert!(error.to_string().contains(&u64::MAX.to_string()), "{error}");
    }
}

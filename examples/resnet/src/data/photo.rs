//! Image files: reading, cutting out and scaling.

use super::{Unusable, augment::Crop};
use fast_image_resize::{
    FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer,
    images::{Image, ImageRef},
};
use image::{ImageFormat, ImageReader, RgbImage};
use std::{fs, io::Cursor, path::Path};

/// Extensions of the files that are images, in any case.
pub(crate) const EXTENSIONS: [&str; 3] = ["jpg", "jpeg", "png"];
/// The shorter side of an image, in sizes of the part that is cut out of its middle: 256 to 224.
const MARGIN: f64 = 256.0 / 224.0;

/// Reads a JPEG or PNG, told apart by its content, as RGB whatever its channels.
pub(crate) fn read(path: &Path) -> Result<RgbImage, Unusable> {
    let unusable = |reason: String| Unusable { path: path.to_owned(), reason };
    let bytes = fs::read(path).map_err(|error| unusable(error.to_string()))?;
    decode(&bytes).map_err(unusable)
}

fn decode(bytes: &[u8]) -> Result<RgbImage, String> {
    let reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format();
    let reader = reader.map_err(|error| error.to_string())?;
    match reader.format() {
        Some(ImageFormat::Jpeg) if !has_jpeg_end(bytes) => {
            // The decoder would fill up what is missing with grey.
            return Err("the file is truncated: a JPEG without its end".into());
        }
        Some(ImageFormat::Jpeg | ImageFormat::Png) => {}
        _ => return Err("expected a JPEG or PNG, got another format".into()),
    }
    Ok(reader.decode().map_err(|error| error.to_string())?.into_rgb8())
}

/// Whether a JPEG's image data ends in the marker that says so. Thumbnails in front of it, which are images with
/// an end of their own, are stepped over.
fn has_jpeg_end(bytes: &[u8]) -> bool {
    const START_OF_SCAN: u8 = 0xda;
    const END: [u8; 2] = [0xff, 0xd9];
    let mut position = 2;
    while let Some([0xff, marker, high, low]) = bytes.get(position..position + 4) {
        if *marker == START_OF_SCAN {
            // Within image data, a byte of 0xff is followed by another one.
            return bytes[position..].windows(2).any(|pair| pair == END);
        }
        // Markers may be padded with bytes of 0xff.
        position += match marker {
            0xff => 1,
            _ => 2 + usize::from(u16::from_be_bytes([*high, *low])),
        };
    }
    false
}

/// Scales a part of an image to `size` by `size` pixels, 8-bit RGB row by row. Each pixel is the mean of all that it
/// covers, weighted by their distance.
pub(crate) fn scale(image: &RgbImage, crop: Crop, size: usize) -> Vec<u8> {
    let side = size as u32;
    let mut scaled = Image::new(side, side, PixelType::U8x3);
    let options = ResizeOptions::new()
        .resize_alg(ResizeAlg::Convolution(FilterType::Bilinear))
        .crop(crop.left.into(), crop.top.into(), crop.width.into(), crop.height.into());
    let source = ImageRef::new(image.width(), image.height(), image.as_raw(), PixelType::U8x3);
    let result = source.map_err(|error| error.to_string()).and_then(|source| {
        let resized = Resizer::new().resize(&source, &mut scaled, &options);
        resized.map_err(|error| error.to_string())
    });
    match result {
        Ok(()) => scaled.into_vec(),
        // The buffer has the image's size, the crop lies within it and the types are the same.
        Err(error) => unreachable!("scaling {crop:?} of {:?}: {error}", image.dimensions()),
    }
}

/// The middle of an image, as torchvision's weights are evaluated: the shorter side is scaled to 256 of 224 of
/// `size`, and a square is cut out.
pub(crate) fn middle([width, height]: [u32; 2]) -> Crop {
    let shorter = width.min(height);
    let side = ((f64::from(shorter) / MARGIN).round() as u32).clamp(1, shorter);
    Crop { left: (width - side) / 2, top: (height - side) / 2, width: side, height: side }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{DynamicImage, Rgb};

    fn encoded(format: ImageFormat) -> Vec<u8> {
        let image = RgbImage::from_fn(40, 30, |x, y| Rgb([6 * x as u8, 8 * y as u8, 100]));
        let mut bytes = Cursor::new(Vec::new());
        image.write_to(&mut bytes, format).expect("encoded");
        bytes.into_inner()
    }

    #[test]
    fn whole_files_are_read_and_truncated_or_other_ones_refused() {
        for format in [ImageFormat::Jpeg, ImageFormat::Png] {
            let bytes = encoded(format);
            assert_eq!(decode(&bytes).expect("an image").dimensions(), (40, 30));
            for share in [2, 3, 10] {
                let part = &bytes[..bytes.len() - bytes.len() / share];
                assert!(decode(part).is_err(), "{format:?} without a {share}th");
            }
        }
        // All of the image is there, and the decoder would say nothing.
        let jpeg = encoded(ImageFormat::Jpeg);
        assert!(decode(&jpeg[..jpeg.len() - 2]).is_err(), "a JPEG without its end");
        let text = decode(b"GIF89a, or so").expect_err("a GIF");
        assert!(text.contains("expected a JPEG or PNG"), "{text}");
        assert!(decode(b"").is_err());
    }

    #[test]
    fn an_end_within_a_thumbnail_is_none_and_data_after_the_end_do_not_matter() {
        let jpeg = encoded(ImageFormat::Jpeg);
        let thumbnail = [0xff, 0xe1, 0, 6, 0xff, 0xd8, 0xff, 0xd9];
        let mut bytes = [&jpeg[..2], &thumbnail, &jpeg[2..]].concat();
        assert!(has_jpeg_end(&bytes));
        bytes.extend([0; 100]);
        assert!(has_jpeg_end(&bytes));
        bytes.truncate(bytes.len() - 100 - 2);
        assert!(!has_jpeg_end(&bytes));
    }

    #[test]
    fn grey_and_transparent_images_become_rgb() {
        let grey = DynamicImage::new_luma8(5, 4);
        let transparent = DynamicImage::new_rgba16(5, 4);
        for image in [grey, transparent] {
            let mut bytes = Cursor::new(Vec::new());
            image.write_to(&mut bytes, ImageFormat::Png).expect("encoded");
            let read = decode(bytes.get_ref()).expect("an image");
            assert_eq!(read.as_raw().len(), 5 * 4 * 3);
        }
    }

    #[test]
    fn the_middle_is_as_torchvision_cuts_it() {
        assert_eq!(middle([256, 256]), Crop { left: 16, top: 16, width: 224, height: 224 });
        assert_eq!(middle([512, 256]), Crop { left: 144, top: 16, width: 224, height: 224 });
        assert_eq!(middle([1, 1]), Crop { left: 0, top: 0, width: 1, height: 1 });
    }

    #[test]
    fn scaling_takes_the_mean_of_what_a_pixel_covers() {
        // Columns of 0 and 200 in turn.
        let image = RgbImage::from_fn(64, 64, |x, _| Rgb([200 * (x % 2) as u8, 50, 0]));
        let scaled = scale(&image, Crop { left: 0, top: 0, width: 64, height: 64 }, 16);
        assert_eq!(scaled.len(), 16 * 16 * 3);
        for pixel in scaled.chunks(3) {
            assert!(pixel[0].abs_diff(100) < 12 && pixel[1..] == [50, 0], "{pixel:?}");
        }
        let part = scale(&image, Crop { left: 1, top: 0, width: 1, height: 1 }, 3);
        // Between pixels, the neighbours count.
        assert_eq!((part.len(), &part[3..6]), (27, &[200, 50, 0][..]));
    }
}

//! The file format of a stored index: sections of bytes, and a summary at the end that describes
//! them.
//!
//! ```text
//! header    magic (8 bytes), version (u32)
//! sections  one after the other
//! summary   entries: their number (u32), then of each the lengths of its name and value (u32 each)
//!           and both as UTF-8
//!           sections: their number (u64), then of each its length and checksum (u64 each)
//! footer    start, length and checksum of the summary (u64 each), version (u32), magic (8 bytes)
//! ```
//!
//! Numbers are little-endian, checksums XXH64 with seed 0. A checksum or a fixed value covers every
//! byte of the file, so that any changed byte is detected before its contents are used. Sections
//! follow each other without gaps in the order of the summary; their contents are up to the writer.
//! The file is written sequentially; a file without a footer is invalid.

use std::ops::Range;

use twox_hash::XxHash64;

use crate::error::{Error, Result};

/// The first and last bytes of a file. The line end reveals conversions of line endings.
const MAGIC: [u8; 8] = *b"DFNLSH\r\n";

/// The version of files written, and the newest one read.
const VERSION: u32 = 1;

/// Bytes before the first section.
pub const HEADER: usize = MAGIC.len() + size_of::<u32>();

/// Bytes after the summary.
pub const FOOTER: usize = 3 * size_of::<u64>() + size_of::<u32>() + MAGIC.len();

/// A range of bytes of a file, with its checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSection {
    /// Its position in the file.
    pub bytes: Range<u64>,
    checksum: u64,
}

/// The contents of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Names and values.
    pub entries: Vec<(String, String)>,
    /// The sections, in their order.
    pub sections: Vec<FileSection>,
}

/// An error for an invalid file.
pub fn bad(problem: impl Into<String>) -> Error {
    Error::IndexFile(problem.into())
}

/// The header of a file.
pub fn header() -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes()].concat()
}

/// The position of the summary, from the first and last bytes of a file of `size` bytes.
///
/// # Errors
/// [`Error::IndexFile`] for other files, newer versions, and truncated files.
pub fn summary_place(first: &[u8], last: &[u8], size: u64) -> Result<FileSection> {
    let mut header = Fields(first);
    if header.bytes(MAGIC.len()).ok() != Some(&MAGIC[..]) {
        return Err(bad("it is no index of neighbors"));
    }
    let version = header.number()?;
    if version > VERSION {
        return Err(bad(format!(
            "it has version {version} of the format, this program reads up to {VERSION}"
        )));
    }
    let mut footer = Fields(last);
    let [start, length, checksum] = [footer.long()?, footer.long()?, footer.long()?];
    let (again, magic) = (footer.number()?, footer.bytes(MAGIC.len())?);
    if magic != MAGIC || again != version || version == 0 || !footer.0.is_empty() {
        return Err(bad("it is truncated, or its end has been changed"));
    }
    let end = start.checked_add(length);
    if start < HEADER as u64 || end != size.checked_sub(FOOTER as u64) {
        return Err(bad("it is truncated, or its end has been changed"));
    }
    Ok(FileSection { bytes: start..start + length, checksum })
}

impl FileSection {
    /// The section with these bytes, from position `start` on.
    pub fn of(start: u64, bytes: &[u8]) -> Self {
        let checksum = XxHash64::oneshot(0, bytes);
        Self { bytes: start..start + bytes.len() as u64, checksum }
    }

    /// Its length in bytes.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if the length does not fit in `usize`.
    pub fn length(&self) -> Result<usize> {
        usize::try_from(self.bytes.end - self.bytes.start).map_err(|_| bad("it is too large"))
    }

    /// Compares the bytes read with the checksum.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if they differ from the bytes written.
    pub fn check(&self, bytes: &[u8]) -> Result<()> {
        let all = self.bytes.end - self.bytes.start;
        if bytes.len() as u64 != all || XxHash64::oneshot(0, bytes) != self.checksum {
            let Range { start, end } = self.bytes;
            return Err(bad(format!(
                "bytes {start} to {end} are not those that were written: open the table again if the \
                 file was replaced, else write it again"
            )));
        }
        Ok(())
    }
}

impl Summary {
    /// The value of an entry.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if the summary has no entry `name`.
    pub fn value(&self, name: &str) -> Result<&str> {
        let entry = self.entries.iter().find(|(known, _)| known == name);
        let value = entry.map(|(_, value)| value.as_str());
        value.ok_or_else(|| bad(format!("its summary says nothing of {name}")))
    }

    /// The value of an entry, as a number.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if the summary has no entry `name`, or its value is not a number.
    pub fn count(&self, name: &str) -> Result<usize> {
        let value = self.value(name)?;
        value.parse().map_err(|_| bad(format!("its summary gives {name} as '{value}'")))
    }

    /// The summary and the footer, to be written after the last section.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend((self.entries.len() as u32).to_le_bytes());
        for (name, value) in &self.entries {
            for text in [name, value] {
                bytes.extend((text.len() as u32).to_le_bytes());
            }
            bytes.extend([name.as_bytes(), value.as_bytes()].concat());
        }
        bytes.extend((self.sections.len() as u64).to_le_bytes());
        for section in &self.sections {
            bytes.extend((section.bytes.end - section.bytes.start).to_le_bytes());
            bytes.extend(section.checksum.to_le_bytes());
        }
        let start = self.sections.last().map_or(HEADER as u64, |section| section.bytes.end);
        let summary_section = FileSection::of(start, &bytes);
        for number in [start, bytes.len() as u64, summary_section.checksum] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(MAGIC);
        bytes
    }

    /// Parses a summary, whose bytes were [found](summary_place) at `place`.
    ///
    /// # Errors
    /// [`Error::IndexFile`] if the bytes are not a summary.
    pub fn from_bytes(bytes: &[u8], place: &FileSection) -> Result<Self> {
        place.check(bytes)?;
        let mut fields = Fields(bytes);
        let mut summary = Self::default();
        for _ in 0..fields.number()? {
            let lengths = [fields.number()?, fields.number()?];
            let mut text = |length| {
                let text = std::str::from_utf8(fields.bytes(length as usize)?);
                text.map(str::to_string).map_err(|_| bad("its summary is no text"))
            };
            summary.entries.push((text(lengths[0])?, text(lengths[1])?));
        }
        let mut start = HEADER as u64;
        for _ in 0..fields.long()? {
            let (length, checksum) = (fields.long()?, fields.long()?);
            let end = start.checked_add(length).filter(|end| *end <= place.bytes.start);
            let end = end.ok_or_else(|| bad("its sections are longer than it is"))?;
            summary.sections.push(FileSection { bytes: start..end, checksum });
            start = end;
        }
        if start != place.bytes.start || !fields.0.is_empty() {
            return Err(bad("its summary does not agree with its length"));
        }
        Ok(summary)
    }
}

/// A reader of consecutive fields.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, length: usize) -> Result<&'a [u8]> {
        let (bytes, rest) =
            self.0.split_at_checked(length).ok_or_else(|| bad("it is truncated"))?;
        self.0 = rest;
        Ok(bytes)
    }

    fn number(&mut self) -> Result<u32> {
        let bytes = self.bytes(size_of::<u32>())?.try_into();
        bytes.map(u32::from_le_bytes).map_err(|_| bad("it is truncated"))
    }

    fn long(&mut self) -> Result<u64> {
        let bytes = self.bytes(size_of::<u64>())?.try_into();
        bytes.map(u64::from_le_bytes).map_err(|_| bad("it is truncated"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (Summary, Vec<u8>) {
        let mut file = header();
        let mut summary = Summary::default();
        for (i, section) in [&b"first"[..], b"", b"the third"].iter().enumerate() {
            summary.entries.push((format!("name {i}"), i.to_string()));
            summary.sections.push(FileSection::of(file.len() as u64, section));
            file.extend(*section);
        }
        file.extend(summary.to_bytes());
        (summary, file)
    }

    fn read(file: &[u8]) -> Result<Summary> {
        let last = file.len().checked_sub(FOOTER).ok_or_else(|| bad("it is truncated"))?;
        let place = summary_place(&file[..HEADER], &file[last..], file.len() as u64)?;
        let range = place.bytes.start as usize..place.bytes.end as usize;
        let summary = Summary::from_bytes(&file[range], &place)?;
        for section in &summary.sections {
            section.check(&file[section.bytes.start as usize..section.bytes.end as usize])?;
        }
        Ok(summary)
    }

    #[test]
    fn a_summary_is_read_as_it_was_written() {
        let (summary, file) = file();
        let parsed = read(&file).unwrap();
        assert_eq!(parsed, summary);
        assert_eq!(parsed.count("name 2").unwrap(), 2);
        assert!(parsed.value("name 3").is_err());
    }

    /// A change of any byte or of the length is an error.
    #[test]
    fn any_change_is_noticed() {
        let (_, file) = file();
        for at in 0..file.len() {
            for change in [1, 0x80, 0xff] {
                let mut changed = file.clone();
                changed[at] ^= change;
                assert!(read(&changed).is_err(), "byte {at}");
            }
            assert!(read(&file[..at]).is_err(), "{at} bytes");
            let mut longer = file.clone();
            longer.insert(at, 0);
            assert!(read(&longer).is_err(), "a byte more at {at}");
        }
    }

    #[test]
    fn a_newer_file_says_so() {
        let (_, mut file) = file();
        let end = file.len() - MAGIC.len();
        file[end - 4] = 2;
        file[MAGIC.len()] = 2;
        let error = read(&file).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }
}

//! The one error type: what went wrong, and where.
use std::{fmt, panic::Location};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Shapes, axes or sizes that do not fit together.
    Shape,
    /// An element type that an operation does not take.
    DType,
    /// Tensors of different devices mixed, or a device that cannot do what was asked.
    Device,
    /// A layer graph that cannot be built or differentiated.
    Graph,
    /// A data set or one of its files.
    Data,
    /// A partition of the graph over workers.
    Plan,
    /// A schedule that cannot be made, or was found unsafe.
    Schedule,
    /// A configuration key, flag or file.
    Config,
    /// A checkpoint.
    Checkpoint,
    /// Messages between ranks, and ranks that died or hang.
    Transport,
    /// A value that is not a finite number.
    Numeric,
    /// Reading or writing files.
    Io,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ErrorKind::Shape => "shape",
            ErrorKind::DType => "dtype",
            ErrorKind::Device => "device",
            ErrorKind::Graph => "graph",
            ErrorKind::Data => "data",
            ErrorKind::Plan => "plan",
            ErrorKind::Schedule => "schedule",
            ErrorKind::Config => "config",
            ErrorKind::Checkpoint => "checkpoint",
            ErrorKind::Transport => "transport",
            ErrorKind::Numeric => "numeric",
            ErrorKind::Io => "io",
        })
    }
}

/// An error with its kind, a message that names what was expected, and the places it passed through
/// (node, stage, micro-batch, file), innermost first.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: String,
    context: Vec<String>,
    at: &'static Location<'static>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $kind:ident),* $(,)?) => { impl Error { $(
        $(#[$doc])* #[track_caller]
        pub fn $name(message: impl Into<String>) -> Error { Error::new(ErrorKind::$kind, message) }
    )* } };
}

constructors! {
    /// An [`ErrorKind::Shape`] error.
    shape => Shape,
    /// An [`ErrorKind::DType`] error.
    dtype => DType,
    /// An [`ErrorKind::Device`] error.
    device => Device,
    /// An [`ErrorKind::Graph`] error.
    graph => Graph,
    /// An [`ErrorKind::Data`] error.
    data => Data,
    /// An [`ErrorKind::Plan`] error.
    plan => Plan,
    /// An [`ErrorKind::Schedule`] error.
    schedule => Schedule,
    /// An [`ErrorKind::Config`] error.
    config => Config,
    /// An [`ErrorKind::Checkpoint`] error.
    checkpoint => Checkpoint,
    /// An [`ErrorKind::Transport`] error.
    transport => Transport,
    /// An [`ErrorKind::Numeric`] error.
    numeric => Numeric,
}

impl Error {
    /// An error of `kind` that says `message`.
    #[track_caller]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error(Box::new(Inner {
            kind,
            message: message.into(),
            context: Vec::new(),
            at: Location::caller(),
            source: None,
        }))
    }

    /// An I/O error about the file or folder `path`.
    #[track_caller]
    pub fn io(path: impl AsRef<std::path::Path>, source: std::io::Error) -> Error {
        let mut e = Error::new(ErrorKind::Io, format!("{}: {source}", path.as_ref().display()));
        e.0.source = Some(Box::new(source));
        e
    }

    /// Reads a text file.
    #[track_caller]
    pub(crate) fn read_text(path: impl AsRef<std::path::Path>) -> Result<String> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        String::from_utf8(bytes).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            Error::new(ErrorKind::Io, format!("{}: a text file expected, byte {at} is not of one", path.display()))
        })
    }

    /// Adds a place that the error passed through, such as `node "conv1"`.
    pub fn context(mut self, place: impl Into<String>) -> Error {
        self.0.context.push(place.into());
        self
    }

    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What went wrong, without kind and places.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The places it passed through, innermost first.
    pub fn places(&self) -> &[String] {
        &self.0.context
    }

    /// The line of this crate that raised it.
    pub fn at(&self) -> &'static Location<'static> {
        self.0.at
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.kind, self.0.message)?;
        if !self.0.context.is_empty() {
            write!(f, " (in {})", self.0.context.join(", in "))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} [{}:{}]", self.0.at.file(), self.0.at.line())
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|e| e as _)
    }
}

/// Adds places to the error of a result.
pub trait Context<T> {
    /// Adds the place that `place` makes, if this is an error.
    fn context<S: Into<String>>(self, place: impl FnOnce() -> S) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context<S: Into<String>>(self, place: impl FnOnce() -> S) -> Result<T> {
        self.map_err(|e| e.context(place()))
    }
}

//! Whole programs as text, which may be written and edited by hand.
//!
//! ```text
//! # what stands after a hash is for people
//! weights stashed
//! micro-batches 4
//! step-every 1
//!
//! worker 0
//!   0F0
//!   repeat 3 shift 1 version-shift 1 {
//!     0F1 0B0 0U
//!   }
//!   0B0 0U
//!
//! worker 1
//!   repeat 4 shift 1 version-shift 1 {
//!     1F0 1B0 1U
//!   }
//! ```
//! After the number of `step-every` may stand `each-replica` ([`Programs::each_replica`]). Instructions are spelled as `token.rs`
//! says. A worker has at most one `repeat`; what stands after it is shifted by all
//! of the repeats, as in [`Program`]. Where lines break does not matter.
use super::{Inst, Program, Programs, WeightPolicy};
use crate::{Context, Error, Result};
use std::path::Path;

/// What every text begins with.
const LEGEND: &str = "\
# 2F0@5: forward pass of stage 2, micro-batch 0, with weights of version 5 (the newest if none is named); B: backward pass,
# I and W: its halves; 2A3: stage 2 sums the gradients of its workers, up to micro-batch 3; 2U: update, 2U+: which keeps the
# old version; 2D5: stage 2 drops version 5.
# P3>0 R3>0 S3>0 W3>0: post, receive, send, and wait for the send of edge 3's value of micro-batch 0; P3<0: of its gradient.
# With each repeat micro-batches rise by `shift` and versions by `version-shift`; what follows is shifted by all repeats.
";

/// Characters of a line of instructions.
const WIDTH: usize = 100;

impl WeightPolicy {
    /// Every policy.
    pub const ALL: [WeightPolicy; 2] = [WeightPolicy::Stashed, WeightPolicy::Current];

    /// Its name in texts.
    pub fn name(self) -> &'static str {
        match self {
            WeightPolicy::Stashed => "stashed",
            WeightPolicy::Current => "current",
        }
    }
}

impl Programs {
    /// The programs as text, in lines of at most about a hundred characters.
    pub fn to_text(&self) -> String {
        let (weights, m, every) = (self.weights.name(), self.micro_batches, self.step_every);
        let each = if self.each_replica { " each-replica" } else { "" };
        let mut text = format!("{LEGEND}weights {weights}\nmicro-batches {m}\nstep-every {every}{each}\n");
        for (worker, program) in self.workers.iter().enumerate() {
            let Program { prologue, period, repeats, shift, version_shift, epilogue } = program;
            text += &format!("\nworker {worker}\n{}", lines(prologue, "  "));
            if *program != Program::once(prologue.clone()) {
                text += &format!("  repeat {repeats} shift {shift} version-shift {version_shift} {{\n");
                text += &lines(period, "    ");
                text += "  }\n";
                text += &lines(epilogue, "  ");
            }
        }
        text
    }

    /// Reads what [`to_text`](Programs::to_text) wrote, or a person did. Nothing is proven of it: see [`verify`](fn@super::verify).
    ///
    /// # Errors
    /// Where something else was expected, with line, column and what.
    pub fn from_text(text: &str) -> Result<Programs> {
        Reader::new(text).programs()
    }

    /// Reads programs from a file.
    ///
    /// # Errors
    /// If it cannot be read, or as [`from_text`](Programs::from_text) says, with the file's name.
    pub fn load(path: &Path) -> Result<Programs> {
        let text = Error::read_text(path)?;
        Programs::from_text(&text).context(|| path.display().to_string())
    }
}

/// Instructions in lines.
fn lines(insts: &[Inst], indent: &str) -> String {
    let mut text = String::new();
    let mut line = String::new();
    for inst in insts {
        let word = inst.to_string();
        if !line.is_empty() && indent.len() + line.len() + 1 + word.len() > WIDTH {
            text += &format!("{indent}{line}\n");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += &word;
    }
    if !line.is_empty() {
        text += &format!("{indent}{line}\n");
    }
    text
}

/// A place in a text, counted from 1; columns in characters.
#[derive(Clone, Copy)]
struct Place {
    line: usize,
    column: usize,
}

/// A word or a brace of the text.
#[derive(Clone, Copy)]
struct Word<'a> {
    text: &'a str,
    place: Place,
}

impl Word<'_> {
    /// Whether it is meant as an instruction, and no keyword.
    fn is_instruction(&self) -> bool {
        self.text.starts_with(|c: char| c.is_ascii_digit() || "PRSW".contains(c))
    }
}

/// What is still to be read of a text.
struct Reader<'a> {
    words: std::iter::Peekable<std::vec::IntoIter<Word<'a>>>,
    /// The end of the text.
    end: Place,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Reader<'a> {
        let mut words = Vec::new();
        let mut end = Place { line: 1, column: 1 };
        for (n, line) in text.lines().enumerate() {
            let of_people = line.find('#').unwrap_or(line.len());
            let place = |at: usize| Place { line: n + 1, column: line[..at].chars().count() + 1 };
            let mut at = 0;
            while let Some(space) = line[at..of_people].find(|c: char| !c.is_whitespace()) {
                let rest = &line[at + space..of_people];
                let length = if rest.starts_with(is_brace) { Some(1) } else { rest.find(is_end) };
                let text = &rest[..length.unwrap_or(rest.len())];
                words.push(Word { text, place: place(at + space) });
                at += space + text.len();
            }
            end = place(line.len());
        }
        Reader { words: words.into_iter().peekable(), end }
    }

    /// The error that `what` is not what comes next.
    #[track_caller]
    fn expected(&mut self, what: &str) -> Error {
        let end = Word { text: "", place: self.end };
        let Word { text, place } = *self.words.peek().unwrap_or(&end);
        let got = if text.is_empty() { "the end".into() } else { format!("{text:?}") };
        at(place, &format!("{what} expected, got {got}"))
    }

    fn is_next(&mut self, text: &str) -> bool {
        self.words.peek().is_some_and(|w| w.text == text)
    }

    fn word(&mut self, text: &str) -> Result<()> {
        self.words.next_if(|w| w.text == text).map(|_| ()).ok_or_else(|| self.expected(&format!("`{text}`")))
    }

    /// A number after its name.
    fn number(&mut self, name: &str) -> Result<usize> {
        self.word(name)?;
        // Numbers are shifted as signed ones.
        let number = |w: &Word| w.text.parse().ok().filter(|&n: &usize| isize::try_from(n).is_ok());
        let found = self.words.peek().and_then(number).ok_or_else(|| self.expected("a number"))?;
        self.words.next();
        Ok(found)
    }

    fn programs(mut self) -> Result<Programs> {
        self.word("weights")?;
        let weights = WeightPolicy::ALL.into_iter().find(|policy| self.is_next(policy.name()));
        let weights = weights.ok_or_else(|| self.expected("`stashed` or `current`"))?;
        self.words.next();
        let (micro_batches, step_every) = (self.number("micro-batches")?, self.number("step-every")?);
        let each_replica = self.is_next("each-replica");
        if each_replica {
            self.words.next();
        }
        let mut workers = Vec::new();
        while workers.is_empty() || self.words.peek().is_some() {
            if !self.is_next("worker") {
                let what = if workers.is_empty() { "`worker`" } else { "an instruction, `repeat` or `worker`" };
                return Err(self.expected(what));
            }
            let place = self.words.peek().map_or(self.end, |w| w.place);
            let worker = self.number("worker")?;
            if worker != workers.len() {
                return Err(at(place, &format!("worker {} expected, got worker {worker}", workers.len())));
            }
            workers.push(self.program()?);
        }
        Ok(Programs { workers, weights, micro_batches, step_every, each_replica })
    }

    fn program(&mut self) -> Result<Program> {
        let prologue = self.insts()?;
        if !self.is_next("repeat") {
            return Ok(Program::once(prologue));
        }
        let (repeats, shift) = (self.number("repeat")?, self.number("shift")?);
        let version_shift = self.number("version-shift")?;
        self.word("{")?;
        let period = self.insts()?;
        if !self.is_next("}") {
            return Err(self.expected("an instruction or `}`"));
        }
        self.words.next();
        let epilogue = self.insts()?;
        if self.is_next("repeat") {
            return Err(self.expected("an instruction or `worker` (a worker has one `repeat`)"));
        }
        Ok(Program { prologue, period, repeats, shift, version_shift, epilogue })
    }

    fn insts(&mut self) -> Result<Vec<Inst>> {
        let mut insts = Vec::new();
        while let Some(Word { text, place }) = self.words.next_if(Word::is_instruction) {
            let inst = text.parse().map_err(|e: super::Unexpected| {
                let place = Place { column: place.column + text[..e.at].chars().count(), ..place };
                at(place, &format!("{} expected in {text:?}", e.expected))
            })?;
            insts.push(inst);
        }
        Ok(insts)
    }
}

fn is_brace(c: char) -> bool {
    matches!(c, '{' | '}')
}

/// Whether a word ends before `c`.
fn is_end(c: char) -> bool {
    c.is_whitespace() || is_brace(c)
}

#[track_caller]
fn at(place: Place, what: &str) -> Error {
    Error::schedule(format!("line {}, column {}: {what}", place.line, place.column))
}

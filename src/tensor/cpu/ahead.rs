//! What a product does on the side for the tiles to come: memory that it asks for, and panels that it packs, a little at a time,
//! so that multiply-adds never wait for either.
//!
//! This module's unsafe code rests on one invariant: [`Carry::new`] has checked that all places lie in the two slices, and who
//! calls [`Ahead::some`] promises that these still live and that no one else uses what is written.
use super::lanes::Lanes;

/// Steps of the innermost loop between which something is done on the side.
pub(crate) const BETWEEN: usize = 16;

/// Memory that will be read soon: rows that are asked for a few cache lines at a time, so that they have come when they are
/// needed. Nothing is read here, so that any address will do.
pub(crate) struct Fetch {
    /// The next line.
    at: *const f32,
    /// Lines of a row, and those of this one and of all that are left.
    lines: usize,
    of_row: usize,
    left: usize,
    /// Elements from the end of a row's lines to the next row.
    skip: usize,
    /// Lines that are asked for every [`BETWEEN`] steps.
    rate: usize,
}

impl Fetch {
    pub(crate) const NOTHING: Fetch = Fetch { at: std::ptr::null(), lines: 0, of_row: 0, left: 0, skip: 0, rate: 0 };
    const LINE: usize = 64 / size_of::<f32>();

    /// `rows` rows of `len` elements, `ld` apart, which begin `data`, over `steps` steps.
    pub(crate) fn new(data: &[f32], rows: usize, len: usize, ld: usize, steps: usize) -> Fetch {
        // Rows need not begin with a line.
        let lines = len.div_ceil(Fetch::LINE) + usize::from(!ld.is_multiple_of(Fetch::LINE));
        let rate = (rows * lines * BETWEEN).div_ceil(steps.max(1));
        let skip = ld.wrapping_sub(lines * Fetch::LINE);
        Fetch { at: data.as_ptr(), lines, of_row: lines, left: rows * lines, skip, rate }
    }

    /// # Safety
    /// The machine has the instructions of `L`.
    #[inline(always)]
    unsafe fn some<L: Lanes>(&mut self) {
        for _ in 0..self.rate.min(self.left) {
            // SAFETY: the caller's promise.
            unsafe { L::prefetch(self.at) };
            self.at = self.at.wrapping_add(Fetch::LINE);
            self.left -= 1;
            self.of_row -= 1;
            if self.of_row == 0 {
                self.at = self.at.wrapping_add(self.skip);
                self.of_row = self.lines;
            }
        }
    }
}

/// A panel that is packed: rows of pieces that are copied to where the next tile will read them.
pub(crate) struct Carry {
    from: *const f32,
    to: *mut f32,
    /// Elements of a piece.
    len: usize,
    /// Pieces of a row, and those of this one and of all that are left.
    pieces: usize,
    of_row: usize,
    left: usize,
    /// Elements from a row's end to the next row.
    skip: [usize; 2],
    /// Pieces that are copied every [`BETWEEN`] steps.
    rate: usize,
}

/// `rows` rows of `pieces` pieces of `len` elements without gaps; a piece's one row is at most two vectors long. The last numbers
/// are the elements from row to row.
pub(crate) struct Rows {
    pub rows: usize,
    pub pieces: usize,
    pub len: usize,
    pub from: usize,
    pub to: usize,
}

impl Carry {
    pub(crate) const NOTHING: Carry = Carry {
        from: std::ptr::null(),
        to: std::ptr::null_mut(),
        len: 0,
        pieces: 0,
        of_row: 0,
        left: 0,
        skip: [0; 2],
        rate: 0,
    };

    /// Copies over `steps` steps.
    pub(crate) fn new(from: &[f32], to: &mut [f32], r: &Rows, steps: usize) -> Carry {
        let (width, left) = (r.pieces * r.len, r.rows * r.pieces);
        if left == 0 {
            return Carry::NOTHING;
        }
        let (from, to) = (&from[..(r.rows - 1) * r.from + width], &mut to[..(r.rows - 1) * r.to + width]);
        Carry {
            from: from.as_ptr(),
            to: to.as_mut_ptr(),
            len: r.len,
            pieces: r.pieces,
            of_row: r.pieces,
            left,
            skip: [r.from.wrapping_sub(width), r.to.wrapping_sub(width)],
            rate: (left * BETWEEN).div_ceil(steps.max(1)),
        }
    }

    /// # Safety
    /// As [`Ahead::some`]; a piece is at most two vectors long.
    #[inline(always)]
    unsafe fn some<L: Lanes>(&mut self) {
        for _ in 0..self.rate.min(self.left) {
            // SAFETY: pieces that are left lie in the slices that `new` has checked.
            unsafe {
                if self.len == 2 * L::N {
                    L::load(self.from).store(self.to);
                    L::load(self.from.add(L::N)).store(self.to.add(L::N));
                } else {
                    let first = self.len.min(L::N);
                    L::load_first(self.from, first).store_first(self.to, first);
                    if self.len > L::N {
                        let rest = self.len - L::N;
                        L::load_first(self.from.add(L::N), rest).store_first(self.to.add(L::N), rest);
                    }
                }
            }
            self.from = self.from.wrapping_add(self.len);
            self.to = self.to.wrapping_add(self.len);
            self.left -= 1;
            self.of_row -= 1;
            if self.of_row == 0 {
                self.from = self.from.wrapping_add(self.skip[0]);
                self.to = self.to.wrapping_add(self.skip[1]);
                self.of_row = self.pieces;
            }
        }
    }
}

/// What is done on the side.
pub(crate) struct Ahead {
    /// For what is packed next of `a`, and of `b`.
    pub a: Fetch,
    pub b: Fetch,
    pub carry: Carry,
}

impl Ahead {
    pub(crate) const NOTHING: Ahead = Ahead { a: Fetch::NOTHING, b: Fetch::NOTHING, carry: Carry::NOTHING };

    pub(crate) fn is_nothing(&self) -> bool {
        self.a.left + self.b.left + self.carry.left == 0
    }

    /// What is to be done every [`BETWEEN`] steps.
    ///
    /// # Safety
    /// The machine has the instructions of `L`, two vectors of which hold a piece. The slices of `carry` live, and no one else
    /// reads or writes what it writes.
    #[inline(always)]
    pub(crate) unsafe fn some<L: Lanes>(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.a.some::<L>();
            self.b.some::<L>();
            self.carry.some::<L>();
        }
    }
}
